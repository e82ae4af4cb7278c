#pragma once
// The plan of a stored model that only runs forward passes: evaluation, reference models.

#include "apps/plan/run_plan.h"
#include "core/ops/linear.h"

namespace nrl::plan {

struct ForwardPlanOptions {
  int64_t micro_batch = 1;      ///< sequences per forward pass
  int64_t sequence_length = 0;  ///< tokens per sequence
  precision::Recipe recipe;
  DeviceType device = DeviceType::cpu;
  int threads = 1;                                         ///< CPU threads
  ops::Bf16Products products = ops::Bf16Products::upcast;  ///< CPU: KernelTable::bf16_products
};

/// The solved plan: weights, one microbatch and its activations; no gradients and no optimizer state.
std::unique_ptr<RunPlan> make_forward_plan(model::ModelSpec spec, const ForwardPlanOptions& options);

}  // namespace nrl::plan
