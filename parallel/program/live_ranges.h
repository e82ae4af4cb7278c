#pragma once
// The memory of programs, a fold over their lists: when every buffer of a slot or a bucket is in use.

#include <map>
#include <vector>

#include "memory/liveness.h"
#include "parallel/program/program.h"

namespace nrl::program {

/// The buffers of a program, as indices in a Liveness; -1: never used.
struct Buffers {
  std::vector<int> device;  ///< by Places' index of the buffer
  std::vector<int> host;    ///< by Places::index(): where its contents are offloaded to
  int first_tick = 0;       ///< the tick of step i is first_tick + i
};

/// Adds the uses of all slots to `liveness`, at ticks after `last_tick`, which becomes the tick of the last
/// step. A program with a period must have been lowered from a schedule that covers the whole one
/// (pipeline::covers()).
Buffers live_ranges(const Program& program, const Layers& layers, memory::Liveness& liveness, int& last_tick);

/// When the buffers of a bucket's weights and gradients are in use, in ticks.
struct BucketRanges {
  std::vector<memory::Lifetime> weights = {}, gradients = {};
  int microbatches = 1;  ///< the most whose gradients are added up before they are reduced
};
using RangesOfBuckets = std::map<BucketId, BucketRanges>;

/// Adds the uses of buckets in a program whose step i has the tick first_tick + i. Internal error unless
/// every visit reads weights between a wait for their gather and their release, adds to gradients between
/// open and reduce, and the period ends as it begins.
void add_bucket_ranges(const Program& program, const Layers& layers, int first_tick, RangesOfBuckets& to);

}  // namespace nrl::program
