#include "apps/train/optimizer.h"

#include <algorithm>
#include <cmath>

#include "core/ops/kernel_table.h"

namespace nrl::train {
namespace {

Tensor slice(const Tensor& t, int64_t begin, int64_t count) {
  return t ? t.rows(begin, count) : Tensor{};
}

}  // namespace

Optimizer::Optimizer(const plan::RunPlan& plan, const OptimizerConfig& config, const FlatState& state,
                     ops::Exec& exec)
    : plan_(plan), config_(config), state_(state), exec_(exec) {
  auto owned = plan.owned;
  std::sort(owned.begin(), owned.end(), [](const auto& a, const auto& b) { return a.flat < b.flat; });
  for (const plan::OwnedRange& r : owned) {
    const bool decay = plan.parameters.all[static_cast<size_t>(r.parameter)].decay;
    if (!runs_.empty()) {
      Run& last = runs_.back();
      const int64_t gap = r.flat - (last.flat + last.count);
      // The padding between parameters is zero and stays zero.
      if (last.decay == decay && gap < FlatBuckets::kParamAlign &&
          r.state - (last.state + last.count) == gap) {
        last.count += gap + r.count;
        continue;
      }
    }
    runs_.push_back({r.flat, r.state, r.count, decay});
  }
}

double Optimizer::gradient_norm(comm::Communicator& dp) {
  if (!plan_.sharding.optimizer_state) return std::sqrt(ops::sum_of_squares(exec_, state_.gradients));
  double sum = 0;
  for (int b = 0; b < static_cast<int>(plan_.layout.buckets().size()); ++b) {
    const ElementRange shard = plan_.layout.shard(b, dp.rank());
    sum += ops::sum_of_squares(exec_, slice(state_.gradients, shard.begin, shard.size()));
  }
  dp.all_reduce(std::span(&sum, 1));
  return std::sqrt(sum);
}

void Optimizer::step(double lr, double grad_scale, int64_t update) {
  ops::AdamW a;
  a.lr = static_cast<float>(lr);
  a.beta1 = static_cast<float>(config_.betas[0]);
  a.beta2 = static_cast<float>(config_.betas[1]);
  a.eps = static_cast<float>(config_.eps);
  a.grad_scale = static_cast<float>(grad_scale);
  a.step = update;
  a.zero_grad =
      !plan_.sharding.optimizer_state;  // a sharded optimizer leaves the parts it does not own: see below
  for (const Run& r : runs_) {
    a.weight_decay = r.decay ? static_cast<float>(config_.weight_decay) : 0.0f;
    const Tensor weights = slice(state_.weights, r.flat, r.count);
    a.param = state_.master ? slice(state_.master, r.state, r.count) : weights;
    a.param_low = state_.master ? weights : Tensor{};
    a.grad = slice(state_.gradients, r.flat, r.count);
    a.exp_avg = slice(state_.exp_avg, r.state, r.count);
    a.exp_avg_sq = slice(state_.exp_avg_sq, r.state, r.count);
    ops::adamw(exec_, a);
  }
  if (plan_.sharding.optimizer_state) discard_gradients();
}

void Optimizer::discard_gradients() {
  ops::zero(exec_, state_.gradients);
}

}  // namespace nrl::train
