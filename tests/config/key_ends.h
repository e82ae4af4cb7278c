#pragma once
// The values at both ends of every key's range, and those just outside of it, from the schema.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "core/config/schema.h"

namespace nrl::test {

/// As YAML, in the way a file spells them.
struct KeyEnds {
  std::vector<std::string> inside, outside;
};

namespace key_ends_detail {

inline std::string number(config_detail::Kind kind, double value) {
  return kind == config_detail::Kind::integer ? std::to_string(static_cast<int64_t>(value))
                                              : config_detail::number_text(value);
}

inline void add_numbers(const config_detail::Key& key, KeyEnds& ends) {
  using Limits = std::numeric_limits<double>;
  const bool integer = key.kind == config_detail::Kind::integer;
  const auto beside = [&](double end, double direction) {
    return integer ? end + direction : std::nextafter(end, direction * Limits::infinity());
  };
  const bool low = key.min > Limits::lowest(), high = key.max < Limits::max();
  ends.inside.push_back(number(key.kind, low       ? key.min_open ? beside(key.min, 1) : key.min
                                         : integer ? -1e9
                                                   : Limits::lowest()));
  ends.inside.push_back(number(key.kind, high      ? key.max_open ? beside(key.max, -1) : key.max
                                         : integer ? 1e9
                                                   : Limits::max()));
  if (!key.unlimited.empty()) ends.inside.push_back(key.unlimited);
  if (low) {
    const std::string below = number(key.kind, key.min_open ? key.min : beside(key.min, -1));
    if (below != key.unlimited) ends.outside.push_back(below);
  }
  if (high) ends.outside.push_back(number(key.kind, key.max_open ? key.max : beside(key.max, 1)));
  for (const char* none : {"1e400", ".nan", ".inf", "many"}) ends.outside.emplace_back(none);
}

}  // namespace key_ends_detail

inline KeyEnds ends_of(const config_detail::Key& key) {
  using config_detail::Kind;
  KeyEnds ends;
  switch (key.kind) {
    case Kind::boolean:
      ends.inside = {"true", "false"};
      ends.outside = {"yes", "1", "\"true\""};
      break;
    case Kind::text:
      ends.inside = {"\"\""};
      break;
    case Kind::choice: {
      const auto& built = key.choices.built;
      for (std::string_view name : key.choices.names) {
        const bool works = built.empty() || std::find(built.begin(), built.end(), name) != built.end();
        (works ? ends.inside : ends.outside).emplace_back(name);
      }
      ends.outside.insert(ends.outside.end(), {"no_such_choice", "\"\""});
      break;
    }
    case Kind::integer:
    case Kind::number:
      key_ends_detail::add_numbers(key, ends);
      break;
  }
  if (key.is_list) {
    for (auto* values : {&ends.inside, &ends.outside})
      for (std::string& value : *values) {
        std::string list = value;
        for (int i = 1; i < key.list_length; ++i) list += ", " + value;
        value = "[" + list + "]";
      }
    ends.outside.emplace_back("{a: 1}");
    if (key.list_length > 0) ends.outside.emplace_back("[]");
  }
  (key.null_ok ? ends.inside : ends.outside).emplace_back("null");
  if (key.auto_ok)
    ends.inside.emplace_back("auto");
  else if (key.kind != Kind::text &&
           ends.inside.end() == std::find(ends.inside.begin(), ends.inside.end(), "auto"))
    ends.outside.emplace_back("auto");
  return ends;
}

}  // namespace nrl::test
