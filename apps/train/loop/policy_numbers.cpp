#include "apps/train/loop/policy_numbers.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "apps/data/examples/advantages.h"
#include "apps/plan/loss.h"
#include "core/base/error.h"
#include "core/ops/kl_estimate.h"

namespace nrl::train {
namespace {

constexpr double largest_log = 20;  // of a ratio

/// Weights of the tokens of a sequence for its sampler.
struct Importance {
  std::vector<double> weights;  ///< 1 without a correction
  double out_of_bounds = 0;     ///< tokens whose ratio, or whose sequence's, is
};

/// `logs`: of the ratios of the old policy to the sampler, by token.
Importance importance(const PolicyLossConfig& c, std::span<const double> logs) {
  Importance out;
  const double low = c.truncated_importance_sampling_ratio_min.value_or(0),
               high = c.truncated_importance_sampling_ratio.value_or(INFINITY);
  const auto outside = [&](double ratio) { return ratio < low || ratio > high; };
  const auto ratio_of = [](double log) { return std::exp(std::clamp(log, -largest_log, largest_log)); };
  double sum = 0;
  for (const double log : logs) sum += log;
  const auto count = static_cast<double>(logs.size());
  using Type = ImportanceSampling;
  const Type type = c.truncated_importance_sampling_type.value_or(Type::tis);
  double of_sequence = 1;
  if (type == Type::seq_mask_tis && count > 0) of_sequence = ratio_of(sum / count);
  if (type == Type::seq_tis || type == Type::seq_icepop) of_sequence = ratio_of(sum);
  for (const double log : logs) {
    const bool by_token = type == Type::tis || type == Type::icepop;
    double weight = by_token || type == Type::seq_mask_tis ? ratio_of(log) : of_sequence;
    if (outside(by_token ? weight : of_sequence)) {
      ++out.out_of_bounds;
      weight = type == Type::tis || type == Type::seq_tis ? std::clamp(weight, low, high) : 0;
    }
    out.weights.push_back(weight);
  }
  return out;
}

class PolicyNumbers final : public data::StepNumbers {
 public:
  PolicyNumbers(const Config& config, std::shared_ptr<const data::Examples> examples,
                std::shared_ptr<const data::SequenceNumbers> reference,
                std::shared_ptr<const data::SequenceNumbers> old)
      : loss_(config.loss_fn),
        aggregation_(loss_aggregation(config.loss_fn)),
        by_sequence_(plan::has_sequence_ratios(config.loss_fn.type)),
        longest_(static_cast<double>(config.policy.max_total_sequence_length)),
        examples_(std::move(examples)),
        reference_(std::move(reference)),
        old_(std::move(old)) {
    compute_advantages(config);
  }

  std::vector<int64_t> widths() const override { return std::vector<int64_t>(Column::count, 1); }

  void begin_step(std::span<const int64_t> examples, const data::ExampleStep& step) override {
    tokens_ = static_cast<double>(std::max<int64_t>(step.loss_tokens, 1));
    sequences_ = static_cast<double>(examples.size());
    compare_with_sampler(examples);
  }

  std::vector<std::pair<std::string, double>> metrics() const override { return metrics_; }

  void append(int64_t example, int sequence, int64_t rows, data::HostMicroBatch& batch) override {
    const double count = examples_->length(example, sequence).loss_tokens;
    const double normalizer = normalizer_of(count);
    const std::vector<double>& advantages = advantages_[static_cast<size_t>(example)];
    std::vector<double> weights;
    if (loss_.use_importance_sampling_correction)
      weights = importance(loss_, logs_of_ratios(example)).weights;
    size_t token = 0;                     // of those with a loss
    for (int64_t t = 0; t < rows; ++t) {  // row t predicts token t + 1
      double values[Column::count] = {};
      if (batch.targets[batch.targets.size() - static_cast<size_t>(rows - t)] >= 0) {
        values[Column::normalizer] = normalizer;
        values[Column::advantage] = advantages[advantages.size() > 1 ? token : 0];
        values[Column::old] = old_of(example, t);
        if (reference_) values[Column::reference] = reference_->of(example, 0)[static_cast<size_t>(t)];
        values[Column::importance] = weights.empty() ? 1 : weights[token];
        ++token;
      }
      for (size_t c = 0; c < Column::count; ++c)
        batch.columns[c].push_back(std::bit_cast<int32_t>(static_cast<float>(values[c])));
    }
    if (by_sequence_) batch.sequence_values.push_back(std::max(count, 1.0));
  }

 private:
  using Column = plan::PolicyColumn;

  /// The log-probability of token `row` + 1 before the update: if the examples have none, the sampler's; 0 if
  /// they have neither.
  double old_of(int64_t example, int64_t row) const {
    if (old_) return old_->of(example, 0)[static_cast<size_t>(row)];
    std::span<const float> given = examples_->log_probs(example, data::TokenLogProbs::old);
    if (given.empty()) given = examples_->log_probs(example, data::TokenLogProbs::sampler);
    return given.empty() ? 0 : static_cast<double>(given[static_cast<size_t>(row) + 1]);
  }

  /// Calls `work` with each row of an example whose target has a loss.
  template <class F>
  void for_each_row(int64_t example, F&& work) const {
    for (int64_t t = 0; t + 1 < examples_->length(example, 0).tokens; ++t)
      if (examples_->in_loss(example, 0, t + 1)) work(t);
  }

  std::vector<double> logs_of_ratios(int64_t example) const {
    const std::span<const float> sampler = examples_->log_probs(example, data::TokenLogProbs::sampler);
    std::vector<double> logs;
    for_each_row(example, [&](int64_t t) {
      logs.push_back(old_of(example, t) - static_cast<double>(sampler[static_cast<size_t>(t) + 1]));
    });
    return logs;
  }

  /// The divergence of the policy before the update from the reference at each token with a loss, times its
  /// factor.
  std::vector<double> penalties(int64_t example) const {
    std::vector<double> out;
    for_each_row(example, [&](int64_t t) {
      out.push_back(
          loss_.reference_policy_kl_penalty *
          ops::kl_estimate(loss_.reference_policy_kl_type,
                           reference_->of(example, 0)[static_cast<size_t>(t)] - old_of(example, t)));
    });
    return out;
  }

  void compute_advantages(const Config& config) {
    const RolloutConfig& rollout = config.rollout;
    const bool given = examples_->columns().has(data::ExampleValue::advantage),
               by_group = rollout.adv_estimator == AdvantageEstimator::grpo,
               whitened = rollout.adv_estimator == AdvantageEstimator::reinforce_plus_plus,
               penalized = loss_.use_kl_in_reward && loss_.reference_policy_kl_penalty > 0;
    NRL_CHECK(!penalized || reference_);
    advantages_.resize(static_cast<size_t>(examples_->size()), {0});
    std::vector<double> rewards;
    std::vector<int64_t> groups, rewarded;  // without completions that could not be judged
    for (int64_t e = 0; e < examples_->size(); ++e) {
      double value = examples_->value(e, given ? data::ExampleValue::advantage : data::ExampleValue::reward);
      if (given) {
        advantages_[static_cast<size_t>(e)] = {value};
      } else if (std::isfinite(value)) {
        if (penalized && by_group)
          for (const double penalty : penalties(e)) value -= penalty;
        rewards.push_back(value);
        groups.push_back(examples_->group(e));
        rewarded.push_back(e);
      }
    }
    if (given) return;
    data::AdvantageOptions options{.leave_one_out = rollout.use_leave_one_out_baseline,
                                   .std = rollout.advantage_std};
    if (whitened) options = {.leave_one_out = false, .std = AdvantageStd::none};
    if (by_group || (whitened && rollout.minus_baseline))
      rewards = data::advantages(rewards, groups, options).values;
    if (by_group) {
      for (size_t i = 0; i < rewarded.size(); ++i)
        advantages_[static_cast<size_t>(rewarded[i])] = {rewards[i]};
      return;
    }
    std::vector<double> tokens;  // of all completions with a reward
    for (size_t i = 0; i < rewarded.size(); ++i) {
      const size_t begin = tokens.size();
      for_each_row(rewarded[i], [&](int64_t) { tokens.push_back(rewards[i]); });
      if (!penalized) continue;
      const std::vector<double> lower = penalties(rewarded[i]);
      for (size_t t = 0; t < lower.size(); ++t) tokens[begin + t] -= lower[t];
    }
    if (whitened) data::whiten(tokens);
    for (auto [i, at] = std::pair<size_t, size_t>(0, 0); i < rewarded.size(); ++i) {
      const auto count = static_cast<size_t>(examples_->length(rewarded[i], 0).loss_tokens);
      const auto from = tokens.begin() + static_cast<std::ptrdiff_t>(at);
      if (count > 0)
        advantages_[static_cast<size_t>(rewarded[i])].assign(from, from + static_cast<std::ptrdiff_t>(count));
      at += count;
    }
  }

  void compare_with_sampler(std::span<const int64_t> examples) {
    metrics_.clear();
    const data::ExampleColumns columns = examples_->columns();
    if (!columns.has(data::TokenLogProbs::sampler) || (!old_ && !columns.has(data::TokenLogProbs::old)))
      return;
    double tokens = 0, error = 0, weights = 0, out_of_bounds = 0;
    const PolicyLossConfig without{};  // without bounds
    for (const int64_t e : examples) {
      const std::vector<double> logs = logs_of_ratios(e);
      const Importance own = importance(loss_.use_importance_sampling_correction ? loss_ : without, logs);
      tokens += static_cast<double>(logs.size());
      out_of_bounds += own.out_of_bounds;
      for (const double log : logs) error += std::exp(std::min(std::abs(log), largest_log));
      for (const double weight : own.weights) weights += weight;
    }
    const auto report = [&](const char* name, double sum) {
      metrics_.emplace_back(name, tokens > 0 ? sum / tokens : 1);
    };
    report("token_mult_prob_error", error);
    report("sampling_importance_ratio", weights);
    if (loss_.use_importance_sampling_correction) report("is_oob_ratio", out_of_bounds);
  }

  double normalizer_of(double count) const {
    switch (aggregation_) {
      case LossAggregation::token_mean:
        return 1 / tokens_;
      case LossAggregation::sequence_mean_token_mean:
        return 1 / (sequences_ * std::max(count, 1.0));
      case LossAggregation::sequence_mean_token_sum:
        return 1 / sequences_;
      case LossAggregation::sequence_mean_token_sum_norm:
        return 1 / (sequences_ * longest_);
    }
    NRL_CHECK(false);
  }

  const PolicyLossConfig loss_;
  const LossAggregation aggregation_;
  const bool by_sequence_;
  const double longest_;
  const std::shared_ptr<const data::Examples> examples_;
  const std::shared_ptr<const data::SequenceNumbers> reference_, old_;
  double tokens_ = 1, sequences_ = 1;            // of the step
  std::vector<std::vector<double>> advantages_;  // of the examples: one, or one for each token with a loss
  std::vector<std::pair<std::string, double>> metrics_;
};

}  // namespace

bool reads_old_log_probs(const Config& config) {
  const PolicyLossConfig& c = config.loss_fn;
  return (!c.force_on_policy_ratio && c.type != PolicyObjective::reinforce) ||
         c.use_importance_sampling_correction || c.use_kl_in_reward;
}

std::shared_ptr<data::StepNumbers> policy_numbers(const Config& config,
                                                  std::shared_ptr<const data::Examples> examples,
                                                  std::shared_ptr<const data::SequenceNumbers> reference,
                                                  std::shared_ptr<const data::SequenceNumbers> old) {
  return std::make_shared<PolicyNumbers>(config, std::move(examples), std::move(reference), std::move(old));
}

}  // namespace nrl::train
