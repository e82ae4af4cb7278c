#include "apps/train/loop/example_numbers.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "apps/data/examples/advantages.h"
#include "apps/plan/loss.h"
#include "apps/train/loop/teacher_numbers.h"
#include "core/base/error.h"
#include "core/ops/pair_loss.h"

namespace nrl::train {
namespace {

/// ops::PairValue of the sequences of pairs.
class PairNumbers final : public data::StepNumbers {
 public:
  PairNumbers(std::shared_ptr<const data::Examples> examples,
              std::shared_ptr<const data::SequenceNumbers> reference, bool margins)
      : examples_(std::move(examples)), reference_(std::move(reference)), margins_(margins) {}

  std::vector<int64_t> widths() const override { return {}; }
  void begin_step(std::span<const int64_t> examples, const data::ExampleStep&) override {
    normalizer_ = 1 / static_cast<double>(examples.size());
  }
  void append(int64_t example, int sequence, int64_t /*rows*/, data::HostMicroBatch& batch) override {
    using V = ops::PairValue;
    double values[V::count];
    values[V::normalizer] = normalizer_;
    values[V::tokens] = static_cast<double>(examples_->length(example, sequence).loss_tokens);
    values[V::reference] = reference_ ? reference_->of(example, sequence).front() : 0;
    values[V::margin] = margins_ ? examples_->value(example, data::ExampleValue::margin) : 0;
    batch.sequence_values.insert(batch.sequence_values.end(), std::begin(values), std::end(values));
  }

 private:
  const std::shared_ptr<const data::Examples> examples_;
  const std::shared_ptr<const data::SequenceNumbers> reference_;
  const bool margins_;
  double normalizer_ = 0;
};

/// plan::PolicyColumn of the rows of rollouts.
class RolloutNumbers final : public data::StepNumbers {
 public:
  RolloutNumbers(const Config& config, std::shared_ptr<const data::Examples> examples,
                 std::shared_ptr<const data::SequenceNumbers> reference,
                 std::shared_ptr<const data::SequenceNumbers> old)
      : loss_(config.loss_fn),
        aggregation_(loss_aggregation(config.loss_fn)),
        by_sequence_(plan::has_sequence_ratios(config.loss_fn.type)),
        longest_(static_cast<double>(config.policy.max_total_sequence_length)),
        examples_(std::move(examples)),
        reference_(std::move(reference)),
        old_(std::move(old)) {
    const bool given = examples_->columns().has(data::ExampleValue::advantage);
    advantages_.resize(static_cast<size_t>(examples_->size()));
    std::vector<double> rewards;
    std::vector<int64_t> groups, rewarded;  // without completions that could not be judged
    for (int64_t e = 0; e < examples_->size(); ++e) {
      const double value =
          examples_->value(e, given ? data::ExampleValue::advantage : data::ExampleValue::reward);
      if (given) {
        advantages_[static_cast<size_t>(e)] = value;
      } else if (std::isfinite(value)) {
        rewards.push_back(value);
        groups.push_back(examples_->group(e));
        rewarded.push_back(e);
      }
    }
    // Whole groups, however steps divide them.
    const data::AdvantageOptions options{.leave_one_out = config.rollout.use_leave_one_out_baseline,
                                         .std = config.rollout.advantage_std};
    const data::Advantages of_rewards = data::advantages(rewards, groups, options);
    for (size_t i = 0; i < rewarded.size(); ++i)
      advantages_[static_cast<size_t>(rewarded[i])] = of_rewards.values[i];
  }

  std::vector<int64_t> widths() const override { return std::vector<int64_t>(Column::count, 1); }

  void begin_step(std::span<const int64_t> examples, const data::ExampleStep& step) override {
    tokens_ = static_cast<double>(std::max<int64_t>(step.loss_tokens, 1));
    sequences_ = static_cast<double>(examples.size());
  }

  void append(int64_t example, int sequence, int64_t rows, data::HostMicroBatch& batch) override {
    const double count = examples_->length(example, sequence).loss_tokens;
    const double normalizer = normalizer_of(count), advantage = advantages_[static_cast<size_t>(example)];
    const std::span<const float> old = old_log_probs(example);
    const std::span<const float> sampler = examples_->log_probs(example, data::TokenLogProbs::sampler);
    for (int64_t t = 0; t < rows; ++t) {  // row t predicts token t + 1
      double values[Column::count] = {};
      if (batch.targets[batch.targets.size() - static_cast<size_t>(rows - t)] >= 0) {
        values[Column::normalizer] = normalizer;
        values[Column::advantage] = advantage;
        if (old_)
          values[Column::old] = old_->of(example, sequence)[t];
        else if (!old.empty())
          values[Column::old] = static_cast<double>(old[t + 1]);
        if (reference_) values[Column::reference] = reference_->of(example, sequence)[t];
        values[Column::importance] = 1;
        if (loss_.use_importance_sampling_correction)
          values[Column::importance] = std::min(
              std::exp(std::clamp(values[Column::old] - static_cast<double>(sampler[t + 1]), -20.0, 20.0)),
              loss_.truncated_importance_sampling_ratio.value_or(INFINITY));
      }
      for (size_t c = 0; c < Column::count; ++c)
        batch.columns[c].push_back(std::bit_cast<int32_t>(static_cast<float>(values[c])));
    }
    if (by_sequence_) batch.sequence_values.push_back(std::max(count, 1.0));
  }

 private:
  using Column = plan::PolicyColumn;

  // The log-probabilities before the update; if the file has none, the ones that the sampler reported.
  std::span<const float> old_log_probs(int64_t example) const {
    const std::span<const float> old = examples_->log_probs(example, data::TokenLogProbs::old);
    return old.empty() ? examples_->log_probs(example, data::TokenLogProbs::sampler) : old;
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
  double tokens_ = 1, sequences_ = 1;  // of the step
  std::vector<double> advantages_;     // of the examples
};

}  // namespace

std::shared_ptr<data::StepNumbers> example_numbers(const Config& config,
                                                   std::shared_ptr<const data::Examples> examples,
                                                   std::shared_ptr<const data::SequenceNumbers> reference,
                                                   std::shared_ptr<const data::SequenceNumbers> old) {
  switch (config.algorithm) {
    case Algorithm::pretrain:
    case Algorithm::sft:
      return nullptr;
    case Algorithm::dpo:
    case Algorithm::rm:
      return std::make_shared<PairNumbers>(std::move(examples), std::move(reference),
                                           config.algorithm == Algorithm::rm);
    case Algorithm::grpo:
      return std::make_shared<RolloutNumbers>(config, std::move(examples), std::move(reference),
                                              std::move(old));
    case Algorithm::distill:
      return teacher_numbers(std::move(examples), config.distillation.topk);
  }
  NRL_CHECK(false);
}

}  // namespace nrl::train
