// Rules about the losses of pairs and policies.
#include "core/config/rules/tables.h"

namespace nrl::config_detail {
namespace {

constexpr const char *pair_type = "dpo.loss_type", *policy_type = "loss_fn.type",
                     *aggregation = "loss_fn.aggregation";

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
    row({is("loss_fn.reference_policy_kl_type", {"k1"}), is_not("loss_fn.reference_policy_kl_penalty", "0")},
        {"<:loss_fn.reference_policy_kl_type> has an expected gradient of 0 as a loss: it estimates the "
         "value "
         "of the divergence only",
         {"use k3, or k2, whose gradient is that of the divergence"}}),
    row({"policy.logits_dtype", "algorithm"},
        [](const Config& c) {
          return c.policy.logits_dtype == LogitsDType::bfloat16 && compares_log_probs(c);
        },
        {.reason = "<:policy.logits_dtype> rounds logits to 8 bits: log-probabilities, of which algorithm "
                   "<algorithm> takes differences, are off by up to 2^-8 of the largest logit",
         .remedy = {"remove it: auto computes them in fp32 here"},
         .severity = Severity::warning}),
};

}  // namespace

std::span<const ConfigRule> objective_rules() {
  return objective_table;
}

}  // namespace nrl::config_detail
