#pragma once
// The communication of sharded parameters and gradients around every visit of a layer: gathers of weights,
// with the next visit's in advance, and reductions of gradients. The memory plan derives the lifetimes of the
// buffers from this list, and the engine executes it.

#include <span>
#include <string>
#include <vector>

#include "apps/model/decoder.h"
#include "apps/plan/param_groups.h"

namespace nrl::plan {

struct BucketRef {
  int group = 0, bucket = 0;  ///< of ParamGroup::layout
  auto operator<=>(const BucketRef&) const = default;
};

/// The buckets of each group in a list, which is sorted by groups.
template <class Visit>
void for_each_group(const std::vector<BucketRef>& list, const Visit& visit) {
  std::vector<int> buckets;
  for (size_t i = 0; i < list.size(); ++i) {
    buckets.push_back(list[i].bucket);
    if (i + 1 < list.size() && list[i + 1].group == list[i].group) continue;
    visit(list[i].group, buckets);
    buckets.clear();
  }
}

/// A bucket whose gradients are written from a visit on: the sum over the microbatches that contribute until
/// none of them has a part of its passes still to come.
struct OpenBucket : BucketRef {
  int microbatches = 1;
  bool last = false;  ///< no more microbatches of the optimizer step follow
};

/// Around one visit (model::LayerVisit), in this order. The gathers of a group in one list are one operation,
/// and so are its reductions.
struct LayerTraffic {
  std::vector<BucketRef> gather;    ///< gathers to start, unless started by a prefetch, and to wait for
  std::vector<BucketRef> prefetch;  ///< gathers to start, for the next visit
  std::vector<OpenBucket> open;     ///< buckets to whose gradients the visit contributes first
  std::vector<BucketRef> reduce;    ///< after the layer: buckets whose gradients are complete
  std::vector<BucketRef> release;   ///< weights that the next visit does not read
  std::vector<BucketRef> settle;    ///< reductions whose gradient buffers are needed no more
};

struct TrafficOptions {
  bool gradients = true;  ///< false: no backward pass follows
  bool prefetch = true;   ///< gather the next visit's weights during a visit
  /// Reduce gradients during the next visit; false: wait for them at the end of the visit.
  bool overlap_reduce = true;
};

/// One entry per visit. Gradients that are reduced in the last visit are left to the end of the step.
std::vector<LayerTraffic> layer_traffic(std::span<const model::LayerVisit> visits,
                                        std::span<const ParamGroup> groups, const TrafficOptions& options);

/// Whether weights or gradients of a group are sharded, so that layers communicate.
bool shards(std::span<const ParamGroup> groups);

/// The traffic of a rank's schedules; empty without sharded parameters and gradients.
struct StepTraffic {
  std::vector<LayerTraffic> training, evaluation;
};

/// The traffic of a decoder's schedules. Declares the buffers of the buckets in `memory` (not yet solved)
/// with their lifetimes: ParamGroup::gathered and ParamGroup::bucket_gradients.
StepTraffic plan_layer_traffic(const model::Decoder& decoder, std::span<ParamGroup> groups,
                               const TrafficOptions& options, memory::MemoryPlan& memory);

/// The program of a decoder's training as text, with what is communicated around its visits.
std::string program_text(const model::Decoder& decoder, std::span<const ParamGroup> groups,
                         const TrafficOptions& options);

}  // namespace nrl::plan
