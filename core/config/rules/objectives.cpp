// Rules about the losses of pairs and policies.
#include <cmath>

#include "core/config/rules/tables.h"

namespace nrl::config_detail {
namespace {

constexpr const char *pair_type = "dpo.loss_type", *policy_type = "loss_fn.type",
                     *aggregation = "loss_fn.aggregation",
                     *corrects = "loss_fn.use_importance_sampling_correction",
                     *correction = "loss_fn.truncated_importance_sampling_type";

/// Generation reads the weights that are trained, on ranks of tensor and data parallelism.
Broken whole_weights(const std::string& key) {
  return {
      key +
          " does not fit the generation of rollouts, which needs a model's weights on the ranks of tensor "
          "parallelism, in 16 or 32 bits",
      {"use tensor and data parallelism with shard_strategy: ddp, optim or optim_grads"}};
}

/// Advantages are differences in a group.
bool compares_in_groups(const Config& c) {
  const AdvantageEstimator estimator = c.rollout.adv_estimator;
  return estimator == AdvantageEstimator::grpo ||
         (estimator == AdvantageEstimator::reinforce_plus_plus && c.rollout.minus_baseline);
}

/// "grpo.num_prompts_per_step" and the like.
std::string of(Algorithm algorithm, std::string_view name) {
  return fmt::format("{}.{}", name_of(algorithm), name);
}

bool generates(const Config& c, Algorithm algorithm) {
  return c.algorithm == algorithm && generates_rollouts(c);
}

/// The completions of an algorithm that are generated at once, and the batches in which they are trained.
ConfigRule whole_batches(Algorithm a) {
  const std::string prompts = of(a, "num_prompts_per_step"), each = of(a, "num_generations_per_prompt");
  return row({prompts, each, "policy.train_global_batch_size"},
             [a](const Config& c) {
               return generates(c, a) && rollouts_at_once(c) % c.policy.train_global_batch_size != 0;
             },
             {fmt::format("<:{}> times <:{}> must be one or several global batches: "
                          "<:policy.train_global_batch_size>",
                          prompts, each),
              {"set policy.train_global_batch_size to the product, for one step on each rollout, or to a "
               "divisor"}});
}

/// A number of steps after which a checkpoint is saved: rollouts are not in it.
ConfigRule between_updates(Algorithm a, const std::string& key, int64_t (*steps)(const Config&)) {
  const std::string prompts = of(a, "num_prompts_per_step"), each = of(a, "num_generations_per_prompt");
  return row({key, prompts, each, "policy.train_global_batch_size"},
             [=](const Config& c) {
               if (!generates(c, a) || rollouts_at_once(c) % c.policy.train_global_batch_size != 0)
                 return false;
               return steps(c) % (rollouts_at_once(c) / c.policy.train_global_batch_size) != 0;
             },
             {fmt::format("<:{}> is no multiple of the steps on one generation of rollouts, {} x {} / "
                          "policy.train_global_batch_size: a checkpoint has no rollouts",
                          key, prompts, each),
              {"give a multiple"}});
}
int64_t save_period(const Config& c) {
  return c.checkpointing.enabled ? c.checkpointing.save_period : 0;
}
int64_t last_step(const Config& c) {
  return resolved_loop(c).max_num_steps.value_or(0);
}

const ConfigRule objective_table[] = {
    row({is("dpo.average_log_probs", {"false"}), is(pair_type, {"ipo", "simpo", "orpo"})},
        {"<:dpo.average_log_probs> contradicts <:dpo.loss_type>, which compares means over tokens",
         {"remove it"}}),
    row({is(pair_type, {"orpo"}), is("dpo.sft_weight", {"0"})},
        {"<:dpo.loss_type> has no reference, so that nothing but the likelihood of the chosen sequences "
         "holds "
         "the policy, and dpo.sft_weight is 0",
         {"set dpo.sft_weight: 1, the loss of the paper (Hong et al., 2024)"}}),
    row({is(pair_type, {"robust"}), is("dpo.label_smoothing", {"0"})},
        {.reason = "<:dpo.loss_type> is sigmoid where dpo.label_smoothing is 0",
         .remedy = {"set the probability that a pair is labeled the wrong way round"},
         .severity = Severity::warning}),
    row({is(aggregation, {"token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"}),
         is(policy_type, {"gspo"})},
        {"<:loss_fn.aggregation> contradicts <:loss_fn.type>, whose loss is the mean over sequences of one "
         "number for each",
         {"remove it"}}),
    row({is(aggregation, {"token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum_norm"}),
         is(policy_type, {"rloo"})},
        {"<:loss_fn.aggregation> contradicts <:loss_fn.type>, whose loss is the mean over sequences of one "
         "number for each",
         {"remove it"}}),
    row({is("loss_fn.reference_policy_kl_type", {"k1"}), is_not("loss_fn.reference_policy_kl_penalty", "0"),
         is("loss_fn.use_kl_in_reward", {"false"})},
        {"<:loss_fn.reference_policy_kl_type> has an expected gradient of 0 as a loss: it estimates the "
         "value "
         "of the divergence only",
         {"use k3, or k2, whose gradient is that of the divergence; or loss_fn.use_kl_in_reward: true"}}),
    row({is(corrects, {"true"}), is(policy_type, {"gspo", "rloo"}),
         is(correction, {"null", "tis", "icepop", "seq-mask-tis"})},
        {"<:loss_fn.truncated_importance_sampling_type> weights each token, but the loss of <:loss_fn.type> "
         "is one number for a sequence",
         {"use seq-tis or seq-icepop"}}),
    row({"loss_fn.truncated_importance_sampling_type"},
        [](const Config& c) {
          const PolicyLossConfig& l = c.loss_fn;
          const bool clamps = !l.truncated_importance_sampling_type ||
                              *l.truncated_importance_sampling_type == ImportanceSampling::tis ||
                              *l.truncated_importance_sampling_type == ImportanceSampling::seq_tis;
          return l.use_importance_sampling_correction && !clamps && !l.truncated_importance_sampling_ratio &&
                 !l.truncated_importance_sampling_ratio_min;
        },
        {"<:loss_fn.truncated_importance_sampling_type> leaves out what is beyond bounds, and there are none",
         {"set loss_fn.truncated_importance_sampling_ratio, and truncated_importance_sampling_ratio_min, for "
          "example to 2 and 0.5"}}),
    row({"loss_fn.truncated_importance_sampling_ratio_min", "loss_fn.truncated_importance_sampling_ratio"},
        [](const Config& c) {
          const PolicyLossConfig& l = c.loss_fn;
          return l.truncated_importance_sampling_ratio_min.value_or(0) >
                 l.truncated_importance_sampling_ratio.value_or(INFINITY);
        },
        {"<:loss_fn.truncated_importance_sampling_ratio_min> is above "
         "<:loss_fn.truncated_importance_sampling_ratio>",
         {"exchange them"}}),
    row({is("grpo.adv_estimator.name", {"reinforce_plus_plus", "raw"}), is(policy_type, {"gspo", "rloo"}),
         is("loss_fn.use_kl_in_reward", {"true"}), is_not("loss_fn.reference_policy_kl_penalty", "0")},
        {"<:loss_fn.use_kl_in_reward> gives the tokens of a sequence different advantages, but the loss of "
         "<:loss_fn.type> is one number for a sequence",
         {"set loss_fn.type: clip, or adv_estimator.name: grpo"}}),
    row({"policy.logits_dtype", "algorithm"},
        [](const Config& c) {
          return c.policy.logits_dtype == LogitsDType::bfloat16 && compares_log_probs(c);
        },
        {.reason = "<:policy.logits_dtype> rounds logits to 8 bits: log-probabilities, of which algorithm "
                   "<algorithm> takes differences, are off by up to 2^-8 of the largest logit",
         .remedy = {"remove it: auto computes them in fp32 here"},
         .severity = Severity::warning}),
    whole_batches(Algorithm::grpo),
    whole_batches(Algorithm::distill),
    row({"grpo.num_generations_per_prompt", "algorithm"},
        [](const Config& c) {
          return generates(c, Algorithm::grpo) && c.rollout.num_generations_per_prompt == 1 &&
                 compares_in_groups(c);
        },
        {"<:grpo.num_generations_per_prompt>: advantages compare the completions of a prompt with each other",
         {"give 2 or more"}}),
    row({"reward", "data.train.format"},
        [](const Config& c) {
          return generates(c, Algorithm::grpo) && c.reward.empty() && !c.loss_fn.use_kl_in_reward;
        },
        {"completions of prompts need a reward: the list `reward` is empty",
         {"reward: [{type: exact, answer_key: answer}], or another type (docs/post-training.md)"}}),
    row({"grpo.use_dynamic_sampling", "reward"},
        [](const Config& c) {
          return generates(c, Algorithm::grpo) && c.rollout.use_dynamic_sampling && c.reward.empty();
        },
        {"<:grpo.use_dynamic_sampling> replaces groups of equal rewards, and the list `reward` is empty",
         {"set it to false"}}),
    row({"reference.model_name", "policy.fp8_cfg.enabled"},
        [](const Config& c) { return c.loss_fn.reference_model && c.policy.fp8_cfg.enabled; },
        {"<:reference.model_name> does not fit <:policy.fp8_cfg.enabled>: both models compute in one "
         "precision, "
         "and the other model's shapes need not suit FP8",
         {"set policy.fp8_cfg.enabled: false"}}),
    row({"data.train.format", "reference.model_name"},
        [](const Config& c) { return generates(c, Algorithm::distill) && !c.loss_fn.reference_model; },
        {"<:data.train.format> of algorithm distill needs a teacher that scores what the student generates: "
         "reference.model_name is null",
         {"set reference.model_name to the directory of a model with the student's tokenizer, or give "
          "rollouts "
          "with a teacher's numbers (data.train.format: rollouts)"}}),
    between_updates(Algorithm::grpo, "checkpointing.save_period", save_period),
    between_updates(Algorithm::distill, "checkpointing.save_period", save_period),
    between_updates(Algorithm::grpo, "grpo.max_num_steps", last_step),
    between_updates(Algorithm::distill, "distill.max_num_steps", last_step),
    row({"data.validation.format", "data.train.format"},
        [](const Config& c) {
          return generates_rollouts(c) && evaluates(c) && c.data.validation.format != ExampleFormat::prompts;
        },
        {"evaluations of a policy that generates its rollouts generate as well, but "
         "<:data.validation.format>",
         {"set data.validation.format: prompts"}}),
    row({is("data.train.format", {"prompts"}), is_not(key::stages, "1")},
        whole_weights("<:distributed.pipeline_parallel_size>")),
    row({is("data.train.format", {"prompts"}), is_not(key::context, "1")},
        whole_weights("<:distributed.context_parallel_size>")),
    row({is("data.train.format", {"prompts"}), is_not("distributed.expert_parallel_size", "1")},
        whole_weights("<:distributed.expert_parallel_size>")),
    row({is("data.train.format", {"prompts"}), is(key::sharding, {"optim_grads_params", "hsdp"})},
        whole_weights("<:distributed.shard_strategy>")),
    row({is("data.train.format", {"prompts"}), is("policy.fp8_cfg.fp8_param", {"true"})},
        whole_weights("<:policy.fp8_cfg.fp8_param>")),
};

}  // namespace

std::span<const ConfigRule> objective_rules() {
  return objective_table;
}

}  // namespace nrl::config_detail
