#include "core/config/config.h"

#include <algorithm>

#include "core/base/error.h"

namespace nrl {

bool trains_on_examples(const Config& config) {
  return config.algorithm != Algorithm::pretrain;
}

bool generates_rollouts(const Config& config) {
  return (config.algorithm == Algorithm::grpo || config.algorithm == Algorithm::distill) &&
         config.data.train.format == ExampleFormat::prompts;
}

int64_t rollouts_at_once(const Config& config) {
  return config.rollout.num_prompts_per_step * config.rollout.num_generations_per_prompt;
}

std::optional<int64_t> packed_tokens(const PolicyConfig& policy) {
  if (policy.sequence_packing.enabled) return policy.sequence_packing.train_mb_tokens;
  if (policy.dynamic_batching.enabled) return policy.dynamic_batching.train_mb_tokens;
  return std::nullopt;
}

std::optional<int64_t> packed_micro_batch(const Config& config) {
  const auto tokens = packed_tokens(config.policy);
  return tokens ? std::optional(std::max<int64_t>(*tokens / example_tokens(config), 1)) : std::nullopt;
}

int64_t example_tokens(const Config& config) {
  const bool pairs = config.algorithm == Algorithm::dpo || config.algorithm == Algorithm::rm;
  return config.policy.max_total_sequence_length * (pairs ? 2 : 1);
}

const LoopConfig& resolved_loop(const Config& config) {
  switch (config.algorithm) {
    case Algorithm::pretrain:
      return config.pretrain;
    case Algorithm::sft:
      return config.sft;
    case Algorithm::dpo:
      return config.dpo;
    case Algorithm::rm:
      return config.rm;
    case Algorithm::grpo:
      return config.grpo;
    case Algorithm::distill:
      return config.distill;
  }
  fail(Exit::internal, "algorithm {} has no training loop", name_of(config.algorithm));
}

bool evaluates(const Config& config) {
  const LoopConfig& loop = resolved_loop(config);
  return loop.val_period > 0 || loop.val_at_start || loop.val_at_end;
}

std::optional<LossScaling> resolved_loss_scaling(const PolicyConfig& policy) {
  if (!policy.loss_scaling.is_auto()) return policy.loss_scaling.value();
  if (policy.precision == Precision::float16) return LossScaling{.dynamic = true};
  return std::nullopt;
}

std::string format_refusal(Algorithm algorithm, ExampleFormat format) {
  using enum ExampleFormat;
  if (format == automatic) return "";
  const auto refusal = [&](bool fits, std::string_view expected) {
    return fits ? "" : fmt::format("algorithm {} trains on {}", name_of(algorithm), expected);
  };
  switch (algorithm) {
    case Algorithm::pretrain:
      return refusal(format == tokens, "token files");
    case Algorithm::sft:
      return refusal(format == text || format == messages || format == instruction,
                     "text, messages or instructions");
    case Algorithm::dpo:
    case Algorithm::rm:
      return refusal(format == preference, "preferences");
    case Algorithm::grpo:
    case Algorithm::distill:
      return refusal(format == rollouts || format == prompts, "rollouts or prompts");
  }
  return "";
}

bool averages_log_probs(const PreferenceConfig& loss) {
  using enum PreferenceLoss;
  const bool always = loss.loss_type == ipo || loss.loss_type == simpo || loss.loss_type == orpo;
  return loss.average_log_probs.value_or(always);
}

bool averages_sft_log_probs(const PreferenceConfig& loss) {
  return loss.sft_average_log_probs.value_or(averages_log_probs(loss));
}

LossAggregation loss_aggregation(const PolicyLossConfig& loss) {
  const bool of_sequences = loss.type == PolicyObjective::gspo || loss.type == PolicyObjective::rloo;
  return of_sequences ? LossAggregation::sequence_mean_token_sum
                      : loss.aggregation.value_or(LossAggregation::token_mean);
}

bool compares_log_probs(const Config& config) {
  return config.algorithm == Algorithm::dpo || config.algorithm == Algorithm::grpo ||
         config.algorithm == Algorithm::distill;
}

std::string loop_key(const Config& config, std::string_view name) {
  return fmt::format("{}.{}", name_of(config.algorithm), name);
}

int64_t data_seed(const Config& config) {
  return config.data.seed.value_or(resolved_loop(config).seed);
}

}  // namespace nrl
