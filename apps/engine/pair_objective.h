#pragma once
// The objectives of pairs: DPO and its relatives on log-probabilities, and reward models on scores.

#include "apps/engine/objective.h"
#include "core/config/config.h"
#include "core/ops/pair_loss.h"

namespace nrl::engine {

/// Sequences 2p and 2p + 1 of a microbatch are the chosen and the rejected one of a pair;
/// MicroBatch::sequence_values are ops::PairValue.
class Pairs final : public Objective {
 public:
  /// `scores`: the head gives one score per sequence, in place of the log-probabilities of its tokens.
  Pairs(const ops::PairLoss::Options& options, bool scores) : options_(options), scores_(scores) {}

  std::span<const MetricSpec> metrics() const override;
  model::Dependence dependence() const override { return model::Dependence::sequence; }
  void weights(ops::Exec& exec, const model::MicroBatch& batch, const model::HeadOutput& out, int64_t begin,
               int64_t count) override;
  void add_metrics(ops::Exec& exec, const model::MicroBatch& batch, const model::HeadOutput& out,
                   const Tensor& sums) override;

 private:
  Tensor segment_sums(ops::Exec& exec, const model::MicroBatch& batch, const model::HeadOutput& out) const;

  const ops::PairLoss::Options options_;
  const bool scores_;
};

/// The options of algorithms dpo and rm.
ops::PairLoss::Options pair_options(const Config& config);

}  // namespace nrl::engine
