#pragma once
// The objectives of policy gradients.

#include "apps/engine/objective.h"
#include "core/config/config.h"
#include "core/ops/policy_loss.h"

namespace nrl::engine {

/// MicroBatch::columns are plan::PolicyColumn.
class PolicyGradient final : public Objective {
 public:
  /// `on_policy`: the log-probabilities of the step are the old ones, too. `compares`: the divergence from
  /// the reference is reported although the loss may be without it.
  PolicyGradient(const ops::PolicyLoss::Options& options, bool on_policy, bool compares = false)
      : options_(options), on_policy_(on_policy), compares_(compares || options.kl_penalty > 0) {}

  std::span<const MetricSpec> metrics() const override;
  model::Dependence dependence() const override;
  void weights(ops::Exec& exec, const model::MicroBatch& batch, const model::HeadOutput& out, int64_t begin,
               int64_t count) override;
  void add_metrics(ops::Exec& exec, const model::MicroBatch& batch, const model::HeadOutput& out,
                   const Tensor& sums) override;

 private:
  bool by_sequence() const { return dependence() == model::Dependence::sequence; }
  /// The inputs of the loss of some rows.
  ops::PolicyLoss loss(ops::Exec& exec, const model::MicroBatch& batch, const model::HeadOutput& out,
                       int64_t begin, int64_t count) const;

  const ops::PolicyLoss::Options options_;
  const bool on_policy_, compares_;
};

/// The options of algorithm grpo.
ops::PolicyLoss::Options policy_options(const Config& config);

}  // namespace nrl::engine
