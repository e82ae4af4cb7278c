#include "apps/engine/pair_objective.h"

#include <array>

#include "core/ops/segments.h"

namespace nrl::engine {

using PairM = ops::PairMetric;

std::span<const MetricSpec> Pairs::metrics() const {
  static constexpr auto specs = [](bool scores) {
    std::array<MetricSpec, PairM::count> s;
    s[PairM::loss] = {"loss"};
    s[PairM::preference_loss] = {scores ? "" : "preference_loss"};
    s[PairM::sft_loss] = {scores ? "" : "sft_loss"};
    s[PairM::accuracy] = {"accuracy", Per::examples, "acc"};
    s[PairM::rewards_chosen] = {"rewards_chosen_mean", Per::examples};
    s[PairM::rewards_rejected] = {"rewards_rejected_mean", Per::examples};
    s[PairM::rewards_margin] = {"rewards_margin_mean", Per::examples, "margin"};
    s[PairM::log_probs_chosen] = {scores ? "" : "logps_chosen_mean", Per::examples};
    s[PairM::log_probs_rejected] = {scores ? "" : "logps_rejected_mean", Per::examples};
    return s;
  };
  static constexpr auto of_log_probs = specs(false), of_scores = specs(true);
  return scores_ ? of_scores : of_log_probs;
}

Tensor Pairs::segment_sums(ops::Exec& exec, const model::MicroBatch& batch,
                           const model::HeadOutput& out) const {
  const Tensor sums = out.segment_sums.rows(0, batch.sequence_values.dim(0));
  ops::segment_sum(exec, {.x = out.log_prob, .target = batch.target, .segment = batch.segment, .out = sums});
  out.sum_over_rows(sums);
  return sums;
}

void Pairs::weights(ops::Exec& exec, const model::MicroBatch& batch, const model::HeadOutput& out,
                    int64_t /*begin*/, int64_t /*count*/) {
  const Tensor sums = segment_sums(exec, batch, out), gradient = out.segment_weights.rows(0, sums.dim(0));
  ops::pair_loss(exec,
                 {.sums = sums, .values = batch.sequence_values, .options = options_, .gradient = gradient});
  ops::segment_rows(
      exec, {.values = gradient, .target = batch.target, .segment = batch.segment, .out = out.weight});
}

void Pairs::add_metrics(ops::Exec& exec, const model::MicroBatch& batch, const model::HeadOutput& out,
                        const Tensor& metrics) {
  const Tensor sums = segment_sums(exec, batch, out);
  if (out.counts_segments)
    ops::pair_loss(exec,
                   {.sums = sums, .values = batch.sequence_values, .options = options_, .metrics = metrics});
}

ops::PairLoss::Options pair_options(const Config& config) {
  if (config.algorithm == Algorithm::rm)
    return {
        .type = PreferenceLoss::sigmoid, .beta = 1, .center = config.reward_model.center_rewards_coefficient};
  const PreferenceConfig& c = config.preference;
  return {.type = c.loss_type,
          .beta = c.beta,
          .label_smoothing = c.label_smoothing,
          .gamma = c.simpo_gamma,
          .preference_weight = c.preference_weight,
          .sft_weight = c.sft_weight,
          .average = averages_log_probs(c),
          .sft_average = averages_sft_log_probs(c)};
}

}  // namespace nrl::engine
