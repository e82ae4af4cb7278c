#pragma once
// Converts a YAML value to the value of a key. Internal to core/config.

#include <optional>
#include <string>
#include <vector>

#include "core/config/schema.h"
#include "core/config/yaml.h"

namespace nrl::config_detail {

/// Why a value was rejected: message, label next to the caret, and notes.
struct Rejection {
  std::string message;
  std::string label;
  std::vector<std::string> notes;
  Pos pos;
};

struct Converted {
  std::optional<Value> value;
  std::optional<Rejection> rejection;
  std::string translated;  ///< the canonical spelling if a synonym was given
};

/// Checks type, range and support of `node` as a value of `key`.
Converted convert(const Key& key, const Node& node);

}  // namespace nrl::config_detail
