// Keys of the algorithms that compare log-probabilities or scores: the losses of pairs, reward models,
// policies and distillation.
#include "core/config/schema.h"

namespace nrl::config_detail {
namespace {

constexpr double largest_factor = 1e6;

const Need smooths{is("dpo.loss_type", {"sigmoid", "robust", "simpo"})};
const Need clips{is("loss_fn.type", {"clip", "cispo", "gspo", "rloo"})};
const Need compares_to_old{is("loss_fn.force_on_policy_ratio", {"false"})};
const Need corrects{is("loss_fn.use_importance_sampling_correction", {"true"})};
const Need penalizes_divergence{is_not("loss_fn.reference_policy_kl_penalty", "0", "above 0")};

// NRL_PAIR_KEY(t, a): the key "dpo.a" bound to PreferenceConfig::a.
#define NRL_PAIR_KEY(table, member) \
  table.key(                        \
      "dpo." #member, [](auto& c) -> auto& { return c.preference.member; })

void add_preference(Table& t) {
  add_loop(t, Algorithm::dpo, &Config::dpo);
  t.section("dpo",
            "The loop of algorithm dpo, and the loss of pairs of a chosen and a rejected sequence "
            "(docs/post-training.md).",
            {Algorithm::dpo});
  t.resume("dpo", OnResume::reported);
  NRL_PAIR_KEY(t, loss_type)
      .alias("training.loss_type")
      .advice("sigmoid_norm", "write loss_type: sigmoid and average_log_probs: true")
      .advice("cdpo", "write loss_type: sigmoid and label_smoothing")
      .advice("sft", "write sft_weight, the factor of a term beside the loss of pairs")
      .help(
          "Loss of a pair. With a reference: sigmoid (DPO; conservative DPO with label_smoothing), robust "
          "(unbiased for labels that label_smoothing flips), hinge (SLiC), ipo, apo_zero, apo_down. Without: "
          "simpo, orpo (with sft_weight).");
  NRL_PAIR_KEY(t, beta)
      .above(0)
      .at_most(largest_factor)
      .alias("dpo.reference_policy_kl_penalty")
      .alias("training.beta")
      .help(
          "Scale of the differences of log-probabilities: larger values keep the policy closer to the "
          "reference. Of ipo: 1 / (2 beta) is the difference aimed at; of simpo: the scale of the mean "
          "log-probabilities; of orpo: the factor of the odds ratio.");
  NRL_PAIR_KEY(t, label_smoothing)
      .at_least(0)
      .below(0.5)
      .alias("training.label_smoothing")
      .help("Probability that the chosen and the rejected sequence of a pair are interchanged.")
      .only_with(smooths);
  NRL_PAIR_KEY(t, simpo_gamma)
      .at_least(0)
      .at_most(largest_factor)
      .alias("training.simpo_gamma")
      .help("The margin by which beta times the mean log-probability should be larger.")
      .only_with({is("dpo.loss_type", {"simpo"})});
  NRL_PAIR_KEY(t, preference_weight)
      .above(0)
      .at_most(largest_factor)
      .alias("dpo.preference_loss_weight")
      .help("Factor of the loss of pairs.");
  NRL_PAIR_KEY(t, sft_weight)
      .at_least(0)
      .at_most(largest_factor)
      .alias("dpo.sft_loss_weight")
      .help("Factor of the negative log-likelihood of the chosen sequences, which is added; 0: none.");
  NRL_PAIR_KEY(t, average_log_probs)
      .alias("dpo.preference_average_log_probs")
      .help(
          "The loss of pairs is that of means over the tokens of a sequence instead of sums. auto: true for "
          "ipo, simpo and orpo, which have no other form, else false.");
  NRL_PAIR_KEY(t, sft_average_log_probs)
      .help("The same of the term of sft_weight; auto: as the loss of pairs.")
      .only_with({is_not("dpo.sft_weight", "0", "above 0")})
      .idle("false");
}

void add_reward_model(Table& t) {
  add_loop(t, Algorithm::rm, &Config::rm);
  t.section("rm", "The loop of algorithm rm, and the loss of reward models (Bradley and Terry).",
            {Algorithm::rm});
  t.resume("rm", OnResume::reported);
  t.key(
       "rm.center_rewards_coefficient",
       [](auto& c) -> auto& { return c.reward_model.center_rewards_coefficient; })
      .at_least(0)
      .at_most(largest_factor)
      .alias("training.center_rewards_coefficient")
      .help("Factor of (r_chosen + r_rejected)^2, which keeps the mean of the rewards near 0; 0: none.");
}

void add_policy_loss(Table& t) {
  add_loop(t, Algorithm::grpo, &Config::grpo);
  t.section(
      "grpo",
      "The loop of algorithm grpo, which trains on rollouts from files (data.train.format: rollouts) or "
      "on those that the policy generates (prompts). The loss is in loss_fn.",
      {Algorithm::grpo});
  t.section("loss_fn", "The loss of a policy (algorithm grpo).", {Algorithm::grpo});
  t.resume("loss_fn", OnResume::reported);
  NRL_KEY(t, loss_fn.type)
      .on_off("loss_fn.use_cispo", "cispo", "")
      .on_off("loss_fn.sequence_level_importance_ratios", "gspo", "")
      .on_off("loss_fn.disable_ppo_ratio", "reinforce", "")
      .help(
          "clip: the clipped ratio of PPO, per token (GRPO, DAPO, Dr.GRPO); cispo: a clipped ratio without "
          "gradient times the log-probability; reinforce: no ratio; gspo: clip with the geometric mean of "
          "the "
          "ratios of a sequence; rloo: with their product.");
  NRL_KEY(t, loss_fn.aggregation)
      .alias("training.loss_type")
      .advice("cispo", "write loss_fn.type: cispo")
      .on_off("loss_fn.token_level_loss", "token_mean", "sequence_mean_token_mean")
      .help(
          "Mean of the losses of tokens: over all tokens of a step (token_mean); over sequences of their "
          "mean "
          "over tokens, their sum, or their sum divided by policy.max_total_sequence_length. auto: "
          "token_mean; of gspo and rloo, whose loss is one number for a sequence, the mean over sequences.");
  NRL_KEY(t, loss_fn.ratio_clip_min)
      .at_least(0)
      .at_most(1)
      .alias("training.epsilon")
      .help("Ratios are clipped below 1 - ratio_clip_min.")
      .only_with(clips)
      .only_with(compares_to_old);
  NRL_KEY(t, loss_fn.ratio_clip_max)
      .at_least(0)
      .at_most(largest_factor)
      .alias("training.epsilon_high")
      .help("Ratios are clipped above 1 + ratio_clip_max.")
      .only_with(clips)
      .only_with(compares_to_old);
  NRL_KEY(t, loss_fn.ratio_clip_c)
      .above(1)
      .at_most(largest_factor)
      .alias("training.delta")
      .help(
          "Dual clip (Ye et al., 2020): where the advantage A is negative the loss is at most -A "
          "ratio_clip_c; null: no bound.")
      .only_with({is("loss_fn.type", {"clip"})})
      .only_with(compares_to_old);
  NRL_KEY(t, loss_fn.reference_policy_kl_penalty)
      .at_least(0)
      .at_most(largest_factor)
      .alias("training.beta")
      .help("Factor of the KL divergence from the reference, which is added to the loss; 0: none.");
  NRL_KEY(t, loss_fn.reference_policy_kl_type)
      .help(
          "Estimator of the divergence from d, the log-probability of the reference minus the policy's: k2: "
          "d^2 / 2, k3: exp(d) - d - 1. k1, -d, whose expected gradient is 0, serves rewards only "
          "(use_kl_in_reward).")
      .only_with(penalizes_divergence);
  NRL_KEY(t, loss_fn.use_kl_in_reward)
      .help(
          "The divergence of the policy before the update lowers the rewards and is no part of the loss: of "
          "grpo by its sum over the completion, of reinforce_plus_plus each token by its own.")
      .only_with(penalizes_divergence);
  NRL_KEY(t, loss_fn.use_importance_sampling_correction)
      .help(
          "Multiplies the loss of each token by the ratio of its probability before the update to that "
          "when it was sampled: rollouts need logprobs and old_logprobs.")
      .only_with(compares_to_old);
  NRL_KEY(t, loss_fn.truncated_importance_sampling_type)
      .help(
          "How the bounds apply. tis, or null: ratios are clamped; icepop: tokens beyond them have no loss; "
          "seq-mask-tis: sequences whose geometric mean is beyond them have none. With the product of the "
          "ratios of a sequence as the weight of all of its tokens: seq-tis clamps it, seq-icepop gives "
          "sequences beyond the bounds no loss.")
      .only_with(corrects);
  NRL_KEY(t, loss_fn.truncated_importance_sampling_ratio)
      .above(0)
      .at_most(largest_factor)
      .help("Upper bound of these ratios; null: none.")
      .only_with(corrects);
  NRL_KEY(t, loss_fn.truncated_importance_sampling_ratio_min)
      .above(0)
      .at_most(largest_factor)
      .help("Lower bound of these ratios; null: none.")
      .only_with(corrects);
  NRL_KEY(t, loss_fn.entropy_coef)
      .at_least(0)
      .at_most(largest_factor)
      .help("Factor of the entropy of the distribution of every token, which is subtracted from the loss.");
  NRL_KEY(t, loss_fn.force_on_policy_ratio)
      .help(
          "Take the log-probabilities of the step itself for those of the policy that generated the "
          "rollouts: ratios are 1, and the old log-probabilities of the rollouts are not read.")
      .only_with(clips);
}

// NRL_DISTILL_KEY(t, a): the key "distill.a" bound to DistillationConfig::a, "loss_fn.a" in NeMo RL.
#define NRL_DISTILL_KEY(table, member)                                                \
  table                                                                               \
      .key(                                                                           \
          "distill." #member, [](auto& c) -> auto& { return c.distillation.member; }) \
      .alias("loss_fn." #member)

void add_distillation(Table& t) {
  add_loop(t, Algorithm::distill, &Config::distill);
  t.section("distill",
            "The loop of algorithm distill, which trains on rollouts with a teacher's log-probabilities from "
            "files (topk_ids and topk_logprobs of data.train.format: rollouts), or on those that the student "
            "generates (prompts) and reference.model_name scores; and its loss.",
            {Algorithm::distill});
  t.resume("distill", OnResume::reported);
  NRL_DISTILL_KEY(t, kl_type)
      .help(
          "Divergence of the student p from the teacher q at every token: forward, KL(q || p); reverse, "
          "KL(p || q); mixed, a weighted mean of both.");
  NRL_DISTILL_KEY(t, mixed_kl_weight)
      .at_least(0)
      .at_most(1)
      .help("Weight of the forward divergence; the reverse one has the rest.")
      .only_with({is("distill.kl_type", {"mixed"})});
  NRL_DISTILL_KEY(t, temperature)
      .at_least(0.01)
      .at_most(100)
      .help(
          "Divisor T of the logits of teacher and student. The loss is multiplied by T^2, so that gradients "
          "keep their size (Hinton et al., 2015).");
  NRL_DISTILL_KEY(t, zero_outside_topk)
      .help(
          "false: both distributions are those of the teacher's topk ids alone. true: the student's is that "
          "of the whole vocabulary, where the teacher has probability 0 outside of its ids, and e^-100 in "
          "the "
          "reverse divergence.");
  NRL_DISTILL_KEY(t, topk)
      .at_least(1)
      .at_most(1 << 18)
      .alias("distillation.topk_logits_k")
      .help(
          "The teacher's most probable ids of a token that count. Files must have as many or more for every "
          "token. The size of the vocabulary is distillation from all of its logits.");
}

}  // namespace

void add_objective_keys(Table& t) {
  add_preference(t);
  add_reward_model(t);
  add_policy_loss(t);
  add_distillation(t);
}

}  // namespace nrl::config_detail
