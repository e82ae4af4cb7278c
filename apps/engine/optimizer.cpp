#include "apps/engine/optimizer.h"

#include "core/ops/kernel_table.h"

namespace nrl::engine {

using S = ops::StepScalar;

void Optimizer::step(comm::Communicator* all) {
  // Every element counts on exactly one rank, so that the sum over all ranks is the norm of the whole model.
  const Tensor norm = scalars_.rows(S::squared_norm, 1);
  for (const GroupTensors& t : groups_)
    for (const parallel::ElementRange& r : t.group->counted)
      ops::add_sum_of_squares(exec_,
                              {.x = t.gradients.rows(r.begin, r.size()), .out = norm, .accumulate = true});
  static_assert(S::squared_norm == 0);
  const Tensor sums = scalars_.rows(0, S::sums);
  if (all)
    all->all_reduce_async(comm::View(sums.data, sums.numel(), sums.dtype), comm::Reduce::sum,
                          comm::StreamRef{exec_.stream})
        .wait();
  ops::decide_step(exec_, {.scalars = scalars_,
                           .max_norm = max_norm_,
                           .beta1 = config_.betas[0],
                           .beta2 = config_.betas[1],
                           .max_skipped = max_skipped_,
                           .growth_interval = growth_interval_});
  for (const GroupTensors& t : groups_)
    if (t.group->trainable) update(t);
}

void Optimizer::update(const GroupTensors& t) {
  const auto part = [](const Tensor& x, const parallel::ElementRange& r) {
    return x.rows(r.begin, r.size());
  };
  ops::AdamW a;
  a.beta1 = static_cast<float>(config_.betas[0]);
  a.beta2 = static_cast<float>(config_.betas[1]);
  a.eps = static_cast<float>(config_.eps);
  a.rates[0].lr_scale = a.rates[1].lr_scale = t.group->lr_scale;
  a.rates[1].weight_decay = static_cast<float>(config_.weight_decay);
  a.scalars = scalars_;
  const auto scales = [&](const char* name, const parallel::ElementRange& r) {
    const Tensor all = t.find_scales(name);
    return all ? all.rows(r.begin / ops::moment_block, ops::moment_blocks(r.size())) : Tensor{};
  };
  const Tensor master = t.find("master");
  const bool remainders = master && master.dtype == DType::u16;
  for (const plan::UpdateCall& call : t.group->updates) {
    const Tensor weights = part(t.weights, call.weights);
    a.param = remainders ? Tensor{} : master ? part(master, call.state) : weights;
    a.remainder = remainders ? part(master, call.state) : Tensor{};
    a.param_bf16 = master ? weights : Tensor{};
    a.grad = part(t.gradients, call.gradients);
    a.exp_avg = part(t.find("exp_avg"), call.state);
    a.exp_avg_sq = part(t.find("exp_avg_sq"), call.state);
    a.exp_avg_scales = scales("exp_avg", call.state);
    a.exp_avg_sq_scales = scales("exp_avg_sq", call.state);
    a.chunks = t.chunks.rows(call.first_chunk, call.chunks);
    ops::adamw(exec_, a);
  }
  if (t.group->gradients_sharded) return;  // zeroed by every microbatch
  for (const parallel::ElementRange& r : t.group->zeroed)
    ops::zero(exec_, {.x = t.gradients.rows(r.begin, r.size())});
}

}  // namespace nrl::engine
