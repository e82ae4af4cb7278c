// Keys of rollouts that a policy generates while it is trained.
#include <spdlog/fmt/fmt.h>

#include "core/config/schema.h"

namespace nrl::config_detail {
namespace {

const Need trains_policy{is("algorithm", {"grpo"})};
const Need generates{is("data.train.format", {"prompts"})};
const Need whitens{is("grpo.adv_estimator.name", {"reinforce_plus_plus"})};
const Need compares_in_groups{is("grpo.adv_estimator.name", {"grpo"})};

// NRL_ROLLOUT_KEY(t, "grpo.", a): the key "grpo.a" bound to RolloutConfig::a.
#define NRL_ROLLOUT_KEY(table, section, member)                               \
  table                                                                       \
      .key(                                                                   \
          section #member, [](auto& c) -> auto& { return c.rollout.member; }) \
      .only_with(generates)

// The keys of an algorithm that generates rollouts, in its section.
template <class Member>
KeyBuilder rollout_key(Table& t, Algorithm algorithm, std::string_view name, Member member) {
  KeyBuilder key = t.key(
                        fmt::format("{}.{}", name_of(algorithm), name),
                        [member](auto& c) -> auto& { return c.rollout.*member; })
                       .only_with(generates);
  if (algorithm == Algorithm::distill) key.alias(fmt::format("distillation.{}", name));
  return key;
}

void add_generation_counts(Table& t, Algorithm algorithm) {
  const bool judged = algorithm == Algorithm::grpo;
  rollout_key(t, algorithm, "num_prompts_per_step", &RolloutConfig::num_prompts_per_step)
      .at_least(1)
      .at_most(1 << 20)
      .help(fmt::format("Prompts that the {} answers at once, with the same weights.",
                        judged ? "policy" : "student"));
  rollout_key(t, algorithm, "num_generations_per_prompt", &RolloutConfig::num_generations_per_prompt)
      .at_least(1)
      .at_most(1 << 16)
      .alias("training.num_generations")
      .help(fmt::format("Completions of each prompt{}. With num_prompts_per_step they make one or several "
                        "global batches (policy.train_global_batch_size).",
                        judged ? ": a group, in which rewards are compared" : ""));
  rollout_key(t, algorithm, "overlong_filtering", &RolloutConfig::overlong_filtering)
      .help("No loss for completions that were cut off at policy.generation.max_new_tokens.");
  rollout_key(t, algorithm, "max_val_samples", &RolloutConfig::max_val_samples)
      .at_least(1)
      .help("Prompts of an evaluation, from the first one on; null: all.")
      .only_with(evaluates());
  rollout_key(t, algorithm, "val_num_generations_per_prompt", &RolloutConfig::val_num_generations_per_prompt)
      .at_least(1)
      .at_most(1024)
      .help(fmt::format("Completions of each prompt of an evaluation{}.", judged ? ", for pass@k" : ""))
      .only_with(evaluates());
}

}  // namespace

void add_rollout_keys(Table& t) {
  NRL_KEY(t, reward)
      .mappings()
      .resume(OnResume::reported)
      .help(
          "What judges completions (algorithm grpo): a list of {type, name, weight} with the options of the "
          "type, or of names of types. Types: exact, contains, regex, number, math, multiset, format, "
          "length, "
          "json, command (docs/post-training.md). The reward is the sum of weight times part.")
      .only_with(trains_policy)
      .only_with(generates);
  add_generation_counts(t, Algorithm::grpo);
  add_generation_counts(t, Algorithm::distill);
  t.key(
       "grpo.adv_estimator.name", [](auto& c) -> auto& { return c.rollout.adv_estimator; })
      .advice("gdpo", "write grpo, and rewards of which each is normalized")
      .help(
          "Advantages from rewards. grpo: the reward relative to its group; reinforce_plus_plus: rewards, "
          "normalized over all tokens of the rollouts to the mean 0 and the variance 1 (REINFORCE++); raw: "
          "the reward as it is.");
  t.key(
       "grpo.adv_estimator.minus_baseline", [](auto& c) -> auto& { return c.rollout.minus_baseline; })
      .help("Rewards minus the mean of their group are normalized.")
      .only_with(whitens);
  NRL_ROLLOUT_KEY(t, "grpo.", use_leave_one_out_baseline)
      .alias("grpo.adv_estimator.use_leave_one_out_baseline")
      .help("Compare a reward with the mean of the others of its group; false: with the mean of all of it.")
      .only_with(compares_in_groups);
  NRL_ROLLOUT_KEY(t, "grpo.", advantage_std)
      .on_off("grpo.normalize_rewards", "group", "none")
      .on_off("grpo.adv_estimator.normalize_rewards", "group", "none")
      .help(
          "Divisor of the differences: none; the standard deviation of the group, of its others, or of all "
          "rewards of the rollouts (batch).")
      .only_with(compares_in_groups);
  NRL_ROLLOUT_KEY(t, "grpo.", use_dynamic_sampling)
      .help(
          "Replace groups of equal rewards, which train nothing, by completions of further prompts (DAPO).");
  NRL_ROLLOUT_KEY(t, "grpo.", dynamic_sampling_max_gen_batches)
      .at_least(1)
      .at_most(1000)
      .help("Times num_prompts_per_step prompts that are answered at most to find such groups.")
      .only_with({is("grpo.use_dynamic_sampling", {"true"})});
  t.section(
      "reference",
      "The model that the policy's divergence is measured from (loss_fn.reference_policy_kl_penalty), or "
      "the teacher of a student (algorithm distill).",
      {Algorithm::grpo, Algorithm::distill});
  t.resume("reference", OnResume::reported);
  t.key(
       "reference.model_name", [](auto& c) -> auto& { return c.loss_fn.reference_model; })
      .help(
          "Hugging Face directory of a model with the policy's vocabulary, of any size: the teacher of "
          "distillation on policy, for which it must be given. null: the model that training began with.")
      .only_with(generates)
      .only_with(
          {is("algorithm", {"distill"}), is_not("loss_fn.reference_policy_kl_penalty", "0", "above 0")});
  t.section("grpo.adv_estimator", "Advantages (algorithm grpo).", {Algorithm::grpo});
  t.section("policy.generation", "Rollouts and their generation.", {Algorithm::grpo, Algorithm::distill});
  NRL_ROLLOUT_KEY(t, "policy.generation.", max_new_tokens)
      .at_least(1)
      .alias("training.max_completion_length")
      .help("Most tokens of a completion; auto: as many as policy.max_total_sequence_length leaves.");
  t.key(
       "policy.generation.temperature", [](auto& c) -> auto& { return c.rollout.temperature; })
      .at_least(0.01)
      .at_most(100)
      .alias("training.temperature")
      .help(
          "Divisor of the logits where rollouts are sampled and, of algorithm grpo, in all log-probabilities "
          "and entropies of training: rollouts from files must have been sampled with it. The loss of "
          "distillation has a temperature of its own (distill.temperature).")
      .only_with({is("algorithm", {"grpo"}), is("data.train.format", {"prompts"})});
  NRL_ROLLOUT_KEY(t, "policy.generation.", val_temperature)
      .at_least(0)
      .at_most(100)
      .help("Temperature of the samples of evaluations; 0: the most probable tokens.")
      .only_with(evaluates());
}

}  // namespace nrl::config_detail
