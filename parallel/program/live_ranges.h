#pragma once
// The memory of programs, a fold over their lists: when every buffer of a slot is in use.

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

}  // namespace nrl::program
