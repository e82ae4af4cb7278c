#include "apps/engine/objective_choice.h"

#include "apps/engine/pair_objective.h"
#include "apps/engine/policy_objective.h"
#include "core/base/error.h"

namespace nrl::engine {

std::shared_ptr<Objective> make_objective(const Config& config) {
  switch (config.algorithm) {
    case Algorithm::pretrain:
    case Algorithm::sft:
    case Algorithm::distill:  // of scores in place of log-probabilities (model::LossNeeds::divergence)
      return std::make_shared<LanguageModeling>();
    case Algorithm::dpo:
    case Algorithm::rm:
      return std::make_shared<Pairs>(pair_options(config), config.algorithm == Algorithm::rm);
    case Algorithm::grpo:
      return std::make_shared<PolicyGradient>(policy_options(config), config.loss_fn.force_on_policy_ratio,
                                              config.loss_fn.reference_policy_kl_penalty > 0);
  }
  NRL_CHECK(false);
}

}  // namespace nrl::engine
