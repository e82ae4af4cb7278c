#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "core/config/load.h"

namespace nrl::test {

/// The smallest configuration that is complete; keys are added by appending sections or by overrides.
inline const std::string base_yaml =
    "policy:\n"
    "  model: {model_type: llama}\n"
    "pretrain:\n"
    "  max_num_steps: 10\n"
    "data:\n"
    "  train: {data_path: corpus}\n";

inline ConfigResult load_text(std::string_view text, std::vector<std::string> overrides = {}) {
  return load_config_text(text, "t.yaml", overrides);
}
inline ConfigResult load_base(std::vector<std::string> overrides) {
  return load_text(base_yaml, std::move(overrides));
}

inline bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

}  // namespace nrl::test
