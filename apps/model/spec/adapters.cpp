#include "apps/model/spec/adapters.h"

#include <algorithm>
#include <cmath>

#include <fnmatch.h>

namespace nrl::model {

float AdapterSpec::scale() const {
  const auto r = static_cast<double>(rank);
  return static_cast<float>(alpha / (rank_stabilized ? std::sqrt(r) : r));
}

bool AdapterSpec::selects(std::string_view module) const {
  const auto any = [&](const std::vector<std::string>& patterns) {
    return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
      return pattern == all_linear || model::selects(pattern, module);
    });
  };
  return rank > 0 && any(targets) && !any(excludes);
}

bool TrainedPart::freezes(std::string_view tensor) const {
  return std::any_of(frozen.begin(), frozen.end(), [&](const std::string& pattern) {
    return selects(pattern, tensor) || selects(pattern, module_of(tensor));
  });
}

bool selects(std::string_view pattern, std::string_view name) {
  const std::string own(pattern), text(name);
  return ::fnmatch(own.c_str(), text.c_str(), 0) == 0 ||
         ::fnmatch(("*." + own).c_str(), text.c_str(), 0) == 0;
}

std::string_view module_of(std::string_view tensor) {
  constexpr std::string_view weight = ".weight";
  return tensor.ends_with(weight) ? tensor.substr(0, tensor.size() - weight.size()) : tensor;
}

}  // namespace nrl::model
