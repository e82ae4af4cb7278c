#pragma once
// Keys whose values differ in two configurations.

#include <string>
#include <vector>

#include "core/config/result.h"

namespace nrl {

struct KeyDifference {
  std::string key;
  std::string a, b;  ///< canonical YAML; empty for a key of policy.model that is not given
};

/// In the order of the option table, then keys of policy.model. Both must be ok().
std::vector<KeyDifference> differences(const ConfigResult& a, const ConfigResult& b);

}  // namespace nrl
