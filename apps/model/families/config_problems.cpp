#include "apps/model/families/config_problems.h"

#include <utility>

namespace nrl::model {

ModelConfigError::ModelConfigError(std::vector<ModelProblem> problems)
    : Error(Exit::config,
            [&] {
              std::string text;
              for (const ModelProblem& p : problems) text += (text.empty() ? "" : "\n") + p.text;
              return text;
            }()),
      problems_(std::move(problems)) {}

}  // namespace nrl::model
