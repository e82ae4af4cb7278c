// Rules about the head of the model: logits, or the score of a reward model.
#include "apps/check/rule.h"

namespace nrl::check {
namespace {

Verdict judge_reward_model(const Facts& f) {
  if (f.config().algorithm == Algorithm::rm || f.spec().head == model::HeadKind::vocabulary) return {};
  return {
      {fmt::format("the model is a reward model, which has a score instead of logits; algorithm {} trains "
                   "logits",
                   name_of(f.config().algorithm)),
       {"set algorithm: rm, or start from a ...ForCausalLM"}}};
}

Verdict judge_samples(const Facts& f) {
  if (f.config().algorithm != Algorithm::rm || f.config().logger.sample_period == 0) return {};
  return {{"logger.sample_period: a reward model generates no text", {"set it to 0"}}};
}

const Rule head_table[] = {
    {{"algorithm", "policy.model_name"}, judge_reward_model},
    {{"logger.sample_period", "algorithm"}, judge_samples},
};

}  // namespace

std::span<const Rule> head_rules() {
  return head_table;
}

}  // namespace nrl::check
