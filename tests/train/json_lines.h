#pragma once
#include <sstream>
#include <string>
#include <vector>

#include "core/io/json.h"

namespace nrl::test {

/// The objects of a text that has one in each line; `name` is for messages.
inline std::vector<JsonValue> json_lines(const std::string& text, const std::string& name) {
  std::istringstream in(text);
  std::vector<JsonValue> out;
  for (std::string line; std::getline(in, line);) out.push_back(parse_json(line, name));
  return out;
}

}  // namespace nrl::test
