#pragma once
// Training objectives as functions of the log-probabilities of the target tokens.

#include <span>
#include <string_view>

#include "apps/model/spec/loss_rule.h"

namespace nrl::engine {

/// The divisor of a metric: a count of the step over all ranks.
enum class Per : uint8_t { one, tokens, examples };

/// A sum over the rows or sequences of all microbatches and data-parallel ranks of a step.
struct MetricSpec {
  std::string_view name;  ///< as it is logged; empty: not logged. Must outlive the steps in flight
  Per per = Per::one;
  std::string_view brief = {};  ///< its name in the terminal; empty: not shown there
  double sign = 1;              ///< factor of what is reported
};

/// Global counts of a step or an evaluation, by which metrics are divided.
struct LossCounts {
  double tokens = 0;    ///< with a loss
  double examples = 0;  ///< sequences, or pairs
  /// The reported value of a metric; 0 where nothing was counted.
  double mean(const MetricSpec& metric, double sum) const;
};

/// Tensors are in the memory of the exec's device, and all work is enqueued on its stream. An objective must
/// not wait for a value, so that the step can be captured in a CUDA graph. While the kernels of a step are
/// collected (ops::Exec::needed) no pass has written `log_prob`: an objective that computes without ops must
/// do nothing then.
class Objective : public model::LossRule {
 public:
  /// The metrics, at most ops::StepScalar::max_metrics. The first one is the loss: the step is skipped unless
  /// it is finite.
  virtual std::span<const MetricSpec> metrics() const = 0;
  /// The reported loss.
  double loss(std::span<const double> sums, const LossCounts& counts) const {
    return counts.mean(metrics().front(), sums.front());
  }

  model::Dependence dependence() const override { return model::Dependence::none; }
  void weights(ops::Exec& exec, const model::MicroBatch& batch, const model::HeadOutput& out, int64_t begin,
               int64_t count) override;
  /// Only called with Dependence::batch: every microbatch first runs a forward pass without dropout, after
  /// which this writes batch.loss_weight, (N) f32 dLoss/dlog_prob, from `log_prob`, (N) f32 (0 for tokens
  /// without a target).
  virtual void loss_weights(ops::Exec& exec, const model::MicroBatch& batch, const Tensor& log_prob);

  /// Adds a microbatch's metrics to `sums`, (metrics().size()) f64. Called after the head's pass, of training
  /// or evaluation; `out` has its results, the weights are from training.
  virtual void add_metrics(ops::Exec& exec, const model::MicroBatch& batch, const model::HeadOutput& out,
                           const Tensor& sums) = 0;
};

/// Next-token prediction with the loss weights of the batch.
class LanguageModeling : public Objective {
 public:
  std::span<const MetricSpec> metrics() const override;
  void add_metrics(ops::Exec& exec, const model::MicroBatch& batch, const model::HeadOutput& out,
                   const Tensor& sums) override;
};

}  // namespace nrl::engine
