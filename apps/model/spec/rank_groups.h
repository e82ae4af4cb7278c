#pragma once
// The groups of ranks that the layers of a model communicate in, made from the grid's
// (parallel/grid/groups.h). Communication that runs at the same time as gradients and weights has a lane of
// its own, so that neither waits for the other.

#include "parallel/grid/groups.h"

namespace nrl::model {

/// The ranks that have parts of the tokens of a microbatch, of `tensor` x `context` ranks.
inline parallel::GroupId microbatch_ranks(int tensor, int context) {
  // The lane of attention's exchange: gradients may be summed over the same ranks at the same time.
  return tensor > 1 && context == 1 ? parallel::group::tp : parallel::group::tp_cp.on_lane(2);
}

/// The context-parallel ranks that have parts of the same sequences, for sums over a sequence.
inline constexpr parallel::GroupId segment_ranks = parallel::group::cp.on_lane(2);

/// microbatch_ranks() of all data-parallel ranks.
inline parallel::GroupId batch_ranks(int tensor) {
  return tensor > 1 ? parallel::group::tp_dp_cp : parallel::group::dp_cp;
}

/// The ranks that exchange tokens for their experts.
inline constexpr parallel::GroupId expert_exchange_group = parallel::group::etp_ep.on_lane(3);
/// The ranks with parts of the same experts, which gather the rows of alltoall.
inline constexpr parallel::GroupId expert_parts_group = parallel::group::etp.on_lane(3);

}  // namespace nrl::model
