#pragma once
// The plan of a stored model that only runs forward passes: evaluation, reference models.

#include <memory>

#include "apps/plan/run_plan.h"
#include "core/ops/linear.h"

namespace nrl::plan {

struct ForwardPlanOptions {
  int64_t micro_batch = 1;      ///< sequences per forward pass
  int64_t sequence_length = 0;  ///< tokens per sequence
  /// Microbatches hold sequences of any lengths, with at most micro_batch * sequence_length tokens together,
  /// else samples of equal length.
  bool packed = false;
  int64_t at_once = 1;  ///< microbatches that several pipeline stages take at once (Engine::evaluate())
  double inverse_temperature = 1;  ///< of the distributions that tokens are scored in
  int64_t top_k = 0;               ///< model::LossNeeds::top_k
  precision::Recipe recipe;
  DeviceType device = DeviceType::cpu;
  int threads = 1;                                         ///< CPU threads
  ops::Bf16Products products = ops::Bf16Products::upcast;  ///< CPU: KernelTable::bf16_products
};

/// The solved plan of the rank at `position`: its part of the weights, its part of one microbatch, or of
/// `at_once`, and the activations; no gradients and no optimizer state. Section `distributed` of `config`
/// says how the model is divided, and whether the strategy keeps the weights in shards, in which case stages
/// take one microbatch at a time; `config` must have passed validate_for_world() and suit the model. The
/// defaults are the whole model on one rank.
std::unique_ptr<RunPlan> make_forward_plan(model::ModelSpec spec, const ForwardPlanOptions& options,
                                           const Config& config = {}, const GridPosition& position = {});

/// The plan of a model that rollouts are compared with, or learned from (reference.model_name): packed
/// sequences of the policy's length, as many tokens at once as its microbatches have, divided over the ranks
/// as the policy is.
std::unique_ptr<RunPlan> make_reference_plan(model::ModelSpec spec, const Config& config,
                                             const RunPlan& policy);

}  // namespace nrl::plan
