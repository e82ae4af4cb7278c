#include "apps/engine/optimizer.h"

#include "core/ops/kernel_table.h"
#include "parallel/comm/ledger.h"

namespace nrl::engine {

using S = ops::StepScalar;

Optimizer::Optimizer(const OptimizerConfig& config, double max_norm, int64_t max_skipped,
                     int64_t growth_interval, std::vector<GroupTensors> groups, const Tensor& scalars,
                     const memory::Arenas& arenas, const OffloadedUpdate::Staging& staging,
                     const OffloadedUpdate::Host& host, ops::Exec& exec)
    : config_(config),
      max_norm_(max_norm),
      max_skipped_(max_skipped),
      growth_interval_(growth_interval),
      groups_(std::move(groups)),
      scalars_(scalars),
      exec_(exec),
      offloaded_(
          groups_, [this](const GroupTensors& t, const plan::UpdateCall& call) { return arguments(t, call); },
          arenas, staging, host, exec) {}

void Optimizer::step(comm::Communicator& all) {
  // Every element counts on exactly one rank, so that the sum over all ranks is the norm of the whole model.
  const Tensor norm = scalars_.rows(S::squared_norm, 1);
  for (const GroupTensors& t : groups_) plan::add_squared_norm(exec_, *t.group, t.gradients, norm);
  static_assert(S::squared_norm == 0);
  const Tensor sums = scalars_.rows(0, S::sums);
  const comm::PurposeScope purpose(comm::Purpose::scalars);
  all.all_reduce_async(comm::View(sums.data, sums.numel(), sums.dtype), comm::Reduce::sum,
                       comm::StreamRef{exec_.stream})
      .wait();
  ops::decide_step(exec_, {.scalars = scalars_,
                           .max_norm = max_norm_,
                           .beta1 = config_.betas[0],
                           .beta2 = config_.betas[1],
                           .max_skipped = max_skipped_,
                           .growth_interval = growth_interval_});
  offloaded_.start();
  for (const GroupTensors& t : groups_)
    for (const plan::UpdateCall& call : t.group->updates)
      if (!call.offloaded) ops::adamw(exec_, arguments(t, call));
  offloaded_.finish();
  zero_gradients();
}

void Optimizer::zero_gradients() {
  for (const GroupTensors& t : groups_) {
    if (t.group->gradient_buckets) continue;  // zeroed by every microbatch
    for (const parallel::ElementRange& r : t.group->zeroed)
      ops::zero(exec_, {.x = t.gradients.rows(r.begin, r.size())});
  }
}

ops::AdamW Optimizer::arguments(const GroupTensors& t, const plan::UpdateCall& call) const {
  const auto part = [](const Tensor& x, const parallel::ElementRange& r) {
    return x.rows(r.begin, r.size());
  };
  const auto state = [&](const char* name) { return part(t.find(name, call.offloaded), call.state); };
  const auto scales = [&](const char* name) {
    const Tensor all = t.find_scales(name, call.offloaded);
    return all ? all.rows(call.state.begin / ops::moment_block, ops::moment_blocks(call.state.size()))
               : Tensor{};
  };
  ops::AdamW a;
  a.beta1 = static_cast<float>(config_.betas[0]);
  a.beta2 = static_cast<float>(config_.betas[1]);
  a.eps = static_cast<float>(config_.eps);
  a.rates[0].lr_scale = a.rates[1].lr_scale = t.group->lr_scale;
  a.rates[1].weight_decay = static_cast<float>(config_.weight_decay);
  a.scalars = scalars_;
  const Tensor weights = part(t.weights, call.weights);
  const Tensor master = t.find("master", call.offloaded) ? state("master") : Tensor{};
  const bool remainders = master && master.dtype == DType::u16;
  // Weights of 16 bits without master weights are themselves what is updated.
  const bool alone = !master && weights.dtype != DType::f32;
  a.param = remainders || alone ? Tensor{} : master ? master : weights;
  a.remainder = remainders ? master : Tensor{};
  a.param_bf16 = master || alone ? weights : Tensor{};
  a.grad = part(t.gradients, call.gradients);
  a.exp_avg = state("exp_avg");
  a.exp_avg_sq = state("exp_avg_sq");
  a.exp_avg_scales = scales("exp_avg");
  a.exp_avg_sq_scales = scales("exp_avg_sq");
  a.chunks = t.chunks.rows(call.first_chunk, call.chunks);
  return a;
}

}  // namespace nrl::engine
