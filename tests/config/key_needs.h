#pragma once
// Values that a key needs of other keys to have an effect, from the schema.

#include <string>
#include <vector>

#include "core/config/convert.h"
#include "core/config/source.h"
#include "core/config/yaml.h"
#include "tests/catch.h"
#include "tests/config/key_ends.h"

namespace nrl::test {

using config_detail::Condition;
using config_detail::Key;

inline config_detail::Value value_of(const Key& key, const std::string& text) {
  Diagnostics none;
  const config_detail::Source source("value", "a=" + text, true);
  const config_detail::Converted converted =
      config_detail::convert(key, config_detail::parse_override(source, none).entries.at(0).value);
  REQUIRE(converted.value);
  return *converted.value;
}

/// Values of a key, as in a file.
inline std::vector<std::string> values_of(const Key& key) {
  std::vector<std::string> out = ends_of(key).inside;
  if (key.kind == config_detail::Kind::text) out.emplace_back(key.is_list ? "[a]" : "a");
  return out;
}

/// The key that a condition names; a key of the loop is one of pretrain here.
inline const Key& key_of(const Condition& condition) {
  return *config_detail::Schema::get().find(config_detail::full_name(Config{}, condition.key));
}

/// "key=value" with which the condition holds, or does not.
inline std::string assignment_of(const Condition& condition, bool holds) {
  const Key& key = key_of(condition);
  std::vector<std::string> values = values_of(key);
  values.insert(values.end(), condition.values.begin(), condition.values.end());
  values.push_back(key.default_yaml());
  for (const std::string& text : values) {
    Config config;
    key.set(config, value_of(key, text));
    if (condition.holds(config) == holds) return condition.key + "=" + text;
  }
  FAIL("no value of " << condition.key);
  return "";
}

/// "key=value" of what the key needs, and of what that needs.
inline std::vector<std::string> needed_by(const Key& key) {
  std::vector<std::string> out;
  for (const config_detail::Need& need : key.needs) {
    const Condition& first = need.front();
    const std::vector<std::string> deeper = needed_by(key_of(first));
    out.insert(out.end(), deeper.begin(), deeper.end());
    if (!first.holds(Config{})) out.push_back(assignment_of(first, true));
  }
  return out;
}

}  // namespace nrl::test
