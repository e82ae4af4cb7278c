#pragma once
// The configuration of a run as sinks show it.

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/config/result.h"
#include "core/io/json.h"

namespace nrl::monitor {

/// The keys that the user gave, sorted, with their values in canonical YAML.
std::vector<std::pair<std::string, std::string>> given_settings(const ConfigResult& config);

/// A value in canonical YAML as JSON: a number, true or false, null, a list of these, or else a text.
JsonValue setting_value(std::string_view yaml);

}  // namespace nrl::monitor
