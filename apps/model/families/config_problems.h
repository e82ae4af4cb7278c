#pragma once
// Problems of a config.json.

#include <string>
#include <vector>

#include "core/base/error.h"

namespace nrl::model {

/// One problem of a config.json.
struct ModelProblem {
  std::string key;                   ///< dotted key ("rope_scaling.factor"); empty: the whole file
  std::string text;                  ///< message; names the key
  std::vector<std::string> depends;  ///< all keys that are involved, `key` included
};

/// An invalid or unsupported config.json, with all independent problems; what() has one line per problem.
class ModelConfigError : public Error {
 public:
  explicit ModelConfigError(std::vector<ModelProblem> problems);
  const std::vector<ModelProblem>& problems() const { return problems_; }

 private:
  std::vector<ModelProblem> problems_;
};

}  // namespace nrl::model
