#pragma once
// Collects the problems of a configuration, each at its key. Internal to core/config.

#include <algorithm>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <spdlog/fmt/fmt.h>

#include "core/config/enums.h"
#include "core/config/result.h"

namespace nrl::config_detail {

struct Checker {
  const ConfigResult& result;
  Diagnostics& out;

  /// Whether a check sees what the user gave. Must be called with every key of the check except the one
  /// reported, which error() and warning() query themselves.
  bool sound(std::initializer_list<std::string_view> keys) const {
    return std::all_of(keys.begin(), keys.end(), [this](std::string_view k) { return result.sound(k); });
  }
  /// Reports the first value that a list has several times; "layer ": what a value is.
  template <class T>
  bool unique(const std::string& key, std::vector<T> values, std::string_view what = "") {
    std::sort(values.begin(), values.end());
    const auto twice = std::adjacent_find(values.begin(), values.end());
    if (twice == values.end()) return true;
    if constexpr (std::is_enum_v<T>)
      error(key, fmt::format("{} has {}{} twice", key, what, name_of(*twice)));
    else
      error(key, fmt::format("{} has {}{} twice", key, what, *twice));
    return false;
  }
  bool given(std::string_view key) const { return result.origins.contains(std::string(key)); }
  void error(std::string_view key, std::string message, std::string label = "",
             std::vector<std::string> notes = {}) {
    if (!result.sound(key)) return;
    out.push_back(diagnose(result, key, std::move(message), std::move(label), std::move(notes)));
  }
  void warning(std::string_view key, std::string message, std::vector<std::string> notes = {}) {
    if (!result.sound(key)) return;
    out.push_back(diagnose(result, key, std::move(message), "", std::move(notes), Severity::warning));
  }
  /// Where the key's value was given, for notes.
  std::string where(std::string_view key) const {
    const auto it = result.origins.find(std::string(key));
    return it == result.origins.end() ? "default" : it->second.text;
  }
};

}  // namespace nrl::config_detail
