#include "core/config/diff.h"

#include <map>

#include "core/config/load.h"
#include "core/config/schema.h"

namespace nrl {

std::vector<KeyDifference> differences(const ConfigResult& a, const ConfigResult& b) {
  std::vector<KeyDifference> out;
  for (const config_detail::Key& key : config_detail::Schema::get().keys()) {
    if (!key.get || key.model) continue;
    std::string of_a = value_text(a.config, key.path), of_b = value_text(b.config, key.path);
    if (of_a != of_b) out.push_back({key.path, std::move(of_a), std::move(of_b)});
  }
  std::map<std::string, KeyDifference> model;
  for (const auto& [key, value] : a.model_values) model[key].a = value;
  for (const auto& [key, value] : b.model_values) model[key].b = value;
  for (auto& [key, difference] : model) {
    difference.key = key;
    if (difference.a != difference.b) out.push_back(std::move(difference));
  }
  return out;
}

}  // namespace nrl
