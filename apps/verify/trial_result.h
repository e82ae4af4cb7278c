#pragma once
// The outcome of a trial: a layout against the reference.

#include <string>
#include <vector>

#include "apps/verify/comparison.h"

namespace nrl::verify {

struct TrialResult {
  std::string grid;     ///< plan::grid_line()
  std::string options;  ///< "micro 2, accumulate 2, overlap", for the table of layouts
  std::string model;    ///< "llama, 29 k parameters, float32"
  int64_t sequences = 0, length = 0;
  std::string checkpoints;          ///< what was resumed from what; empty: no checkpoint
  std::vector<Check> checks;        ///< in the order of severity
  std::vector<ComparedStep> steps;  ///< in the order in which they were compared
  int64_t optimizer_steps = 0;      ///< of the reference
  size_t tensors = 0;
  double seconds = 0;
  bool passed() const { return checks.empty() || checks.front().ok(); }
};

}  // namespace nrl::verify
