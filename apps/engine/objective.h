#pragma once
// What a training step minimizes, in terms of the log-probabilities of its target tokens.

#include <span>
#include <string_view>

#include "apps/model/micro_batch.h"

namespace nrl::engine {

/// Tensors are in the memory of the exec's device, and all work is enqueued on its stream: an objective never
/// waits for a value, so that its step can be captured in a CUDA graph.
class Objective {
 public:
  virtual ~Objective() = default;

  /// Names of the sums of a step over all microbatches and data-parallel ranks, at most
  /// ops::StepScalar::max_metrics. The step is skipped unless the first one is finite. The names must outlive
  /// the steps in flight.
  virtual std::span<const std::string_view> metrics() const = 0;

  /// Whether dLoss/dlog_prob depends on the log-probabilities themselves. Every microbatch then runs a
  /// forward pass without dropout first, and weights() between the two passes.
  virtual bool needs_log_probs_first() const { return false; }
  /// Only with needs_log_probs_first(): writes batch.weight, (N) f32 dLoss/dlog_prob, from `log_prob`, (N)
  /// f32 (0 where there is no target). Otherwise the weights are those that came with the batch.
  virtual void weights(ops::Exec& exec, const model::MicroBatch& batch, const Tensor& log_prob);

  /// Adds a microbatch's share to the sums: `sums` is (metrics().size()) f64, `log_prob` is (N) f32 of the
  /// training pass.
  virtual void add_metrics(ops::Exec& exec, const model::MicroBatch& batch, const Tensor& log_prob,
                           const Tensor& sums) = 0;
};

/// Next-token prediction: the weights come with the batch. Metric: "log_prob", the sum over all targets.
class LanguageModeling : public Objective {
 public:
  std::span<const std::string_view> metrics() const override;
  void add_metrics(ops::Exec& exec, const model::MicroBatch& batch, const Tensor& log_prob,
                   const Tensor& sums) override;
};

}  // namespace nrl::engine
