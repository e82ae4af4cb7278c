#include "apps/engine/objective.h"

#include "core/base/error.h"
#include "core/ops/optimizer.h"

namespace nrl::engine {

void Objective::loss_weights(ops::Exec&, const model::MicroBatch&, const Tensor&) {
  NRL_CHECK(false, "this objective uses the loss weights of the batch");
}

std::span<const std::string_view> LanguageModeling::metrics() const {
  static constexpr std::string_view names[] = {"log_prob"};
  return names;
}

void LanguageModeling::add_metrics(ops::Exec& exec, const model::MicroBatch&, const Tensor& log_prob,
                                   const Tensor& sums) {
  ops::add_sum(exec, {.x = log_prob, .out = sums});
}

std::shared_ptr<Objective> make_objective(const Config& config) {
  NRL_CHECK(config.algorithm == Algorithm::pretrain || config.algorithm == Algorithm::sft,
            "algorithm {} has no objective", name_of(config.algorithm));
  return std::make_shared<LanguageModeling>();
}

}  // namespace nrl::engine
