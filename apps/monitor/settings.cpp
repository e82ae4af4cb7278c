#include "apps/monitor/settings.h"

#include <map>

#include "core/base/error.h"
#include "core/config/load.h"

namespace nrl::monitor {

std::vector<std::pair<std::string, std::string>> given_settings(const ConfigResult& config) {
  std::map<std::string, std::string> values(config.model_values.begin(), config.model_values.end());
  for (const auto& [key, origin] : config.origins)
    if (!values.contains(key) && key.find(".model.") == std::string::npos)
      values.emplace(key, value_text(config.config, key));
  return {values.begin(), values.end()};
}

JsonValue setting_value(std::string_view yaml) {
  try {
    JsonValue value = parse_json(yaml, "value");
    if (!value.is_object()) return value;
  } catch (const Error&) {
    // Not JSON: an unquoted text.
  }
  return yaml;
}

}  // namespace nrl::monitor
