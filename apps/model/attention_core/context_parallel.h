#pragma once
// Attention of a block over the ranks that split every sequence.

#include "apps/model/program/layer.h"
#include "parallel/context/attention.h"

namespace nrl::model {

class ContextParallel {
 public:
  /// For block `layer`, whose queries, keys and values are of `dtype`; `context.share` must be set.
  ContextParallel(const LayerContext& context, int layer, DType dtype);

  const parallel::ContextAttention& attention() const { return attention_; }
  /// The boundaries of a microbatch for this block.
  std::span<const parallel::CallBounds> bounds(const MicroBatch& batch) const;
  /// The groups that the exchange uses; others are null.
  parallel::ContextGroups groups(const Run& r) const;

 private:
  parallel::ContextExchange exchange_;
  size_t index_;  ///< among context_kinds()
  parallel::ContextAttention attention_;
};

/// The group of some of the ranks of a block with this exchange.
parallel::GroupId context_group(const parallel::ContextExchange& exchange, parallel::ContextRanks ranks);
/// The groups that blocks with these exchanges communicate in, in context groups of `size` ranks.
std::vector<parallel::GroupId> context_groups(std::span<const parallel::ContextExchange> exchanges, int size);

}  // namespace nrl::model
