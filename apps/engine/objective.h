#pragma once
// Training objectives as functions of the log-probabilities of the target tokens.

#include <memory>
#include <span>
#include <string_view>

#include "apps/model/spec/micro_batch.h"
#include "core/config/config.h"

namespace nrl::engine {

/// Tensors are in the memory of the exec's device, and all work is enqueued on its stream. An objective must
/// not wait for a value, so that the step can be captured in a CUDA graph. While the kernels of a step are
/// collected (ops::Exec::needed) no pass has written `log_prob`: an objective that computes without ops must
/// do nothing then.
class Objective {
 public:
  virtual ~Objective() = default;

  /// Names of the metrics, which are sums over all microbatches and data-parallel ranks of a step; at most
  /// ops::StepScalar::max_metrics. The step is skipped unless the first one is finite. The names must outlive
  /// the steps in flight.
  virtual std::span<const std::string_view> metrics() const = 0;

  /// Whether dLoss/dlog_prob depends on the log-probabilities. Every microbatch then first runs a forward
  /// pass without dropout, followed by loss_weights().
  virtual bool needs_log_probs_first() const { return false; }
  /// Only called if needs_log_probs_first(): writes batch.loss_weight, (N) f32 dLoss/dlog_prob, from
  /// `log_prob`, (N) f32 (0 for tokens without a target). Otherwise the loss weights of the batch are used.
  virtual void loss_weights(ops::Exec& exec, const model::MicroBatch& batch, const Tensor& log_prob);

  /// The reported loss of a step of `tokens` tokens with a target, from its metrics: by default the first
  /// one, a sum of log-probabilities, per token and negated.
  virtual double loss(std::span<const double> metrics, double tokens) const { return -metrics[0] / tokens; }

  /// Adds a microbatch's metrics to `sums`, (metrics().size()) f64. `log_prob`: (N) f32 of the training pass.
  virtual void add_metrics(ops::Exec& exec, const model::MicroBatch& batch, const Tensor& log_prob,
                           const Tensor& sums) = 0;
};

/// Next-token prediction with the loss weights of the batch. Metric: "log_prob", the sum over all targets.
class LanguageModeling : public Objective {
 public:
  std::span<const std::string_view> metrics() const override;
  void add_metrics(ops::Exec& exec, const model::MicroBatch& batch, const Tensor& log_prob,
                   const Tensor& sums) override;
};

/// The objective of a configuration.
std::shared_ptr<Objective> make_objective(const Config& config);

}  // namespace nrl::engine
