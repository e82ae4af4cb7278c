#pragma once
// A training run of the product against the same run of the reference.

#include <cstdint>
#include <string>
#include <vector>

#include "core/io/json.h"

namespace reference {

struct RunFiles {
  std::string yaml;
  std::string initial;              ///< model directory that the run starts from
  std::string samples, validation;  ///< `data show --json` of all training steps, and of an evaluation
  std::string metrics;              ///< metrics.jsonl
  std::string last;                 ///< the checkpoint after the last step
  bool bf16 = false;
  int32_t poison = -1;  ///< steps with this token are to be skipped
};

/// Prints a table of all steps and the worst differences. Exit code: 0 when everything agrees.
int compare_run(const RunFiles& files);

/// The rows of a file with one JSON object a line.
std::vector<nrl::JsonValue> read_lines(const std::string& path);

}  // namespace reference
