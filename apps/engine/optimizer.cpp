#include "apps/engine/optimizer.h"

#include "core/ops/kernel_table.h"

namespace nrl::engine {

using S = ops::StepScalar;

void Optimizer::step(comm::Communicator& dp) {
  const bool sharded = plan_.sharding.optimizer_state;
  const Tensor norm = state_.scalars.rows(S::squared_norm, 1);
  if (sharded) {
    for (int b = 0; b < static_cast<int>(plan_.layout.buckets().size()); ++b) {
      const ElementRange shard = plan_.layout.shard(b, dp.rank());
      ops::add_sum_of_squares(exec_, {state_.gradients.rows(shard.begin, shard.size()), norm, true});
    }
  } else {
    ops::add_sum_of_squares(exec_, {state_.gradients, norm, true});
  }
  // Gradients that all ranks have whole give every rank the whole norm already.
  static_assert(S::squared_norm == 0 && S::metrics == 1);
  const Tensor sums = sharded ? state_.scalars.rows(0, S::sums) : state_.scalars.rows(1, S::sums - 1);
  dp.all_reduce_async(comm::View(sums.data, sums.numel(), sums.dtype), comm::Reduce::sum,
                      comm::StreamRef{exec_.stream})
      .wait();
  ops::decide_step(exec_, {state_.scalars, max_norm_, config_.betas[0], config_.betas[1], max_skipped_});

  ops::AdamW a;
  a.param = state_.master ? state_.master : state_.weights;
  a.param_low = state_.master ? state_.weights : Tensor{};
  a.grad = state_.gradients;
  a.exp_avg = state_.exp_avg;
  a.exp_avg_sq = state_.exp_avg_sq;
  a.beta1 = static_cast<float>(config_.betas[0]);
  a.beta2 = static_cast<float>(config_.betas[1]);
  a.eps = static_cast<float>(config_.eps);
  a.rates[1].weight_decay = static_cast<float>(config_.weight_decay);
  a.zero_grad = !sharded;
  a.chunks = state_.chunks;
  a.scalars = state_.scalars;
  ops::adamw(exec_, a);
  // A sharded update leaves the gradients of other ranks' parts.
  if (sharded) ops::zero(exec_, state_.gradients);
}

}  // namespace nrl::engine
