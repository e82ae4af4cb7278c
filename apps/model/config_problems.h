#pragma once
// What is wrong with a config.json.

#include <string>
#include <vector>

#include "core/base/error.h"

namespace nrl::model {

/// One thing that is wrong with a config.json.
struct ModelProblem {
  std::string key;                   ///< dotted key at fault ("rope_scaling.factor"); empty: the whole file
  std::string text;                  ///< for people; names the key
  std::vector<std::string> depends;  ///< all keys whose values led to it, `key` included
};

/// A config.json that cannot be trained, with every independent problem found; what() has one line for each.
class ModelConfigError : public Error {
 public:
  explicit ModelConfigError(std::vector<ModelProblem> problems);
  const std::vector<ModelProblem>& problems() const { return problems_; }

 private:
  std::vector<ModelProblem> problems_;
};

}  // namespace nrl::model
