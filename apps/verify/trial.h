#pragma once
// Trains a layout and the reference side by side for a few steps and compares them.

#include <string>
#include <vector>

#include "apps/data/gpt_dataset.h"
#include "apps/verify/limits.h"
#include "core/config/load.h"
#include "parallel/comm/world/world.h"

namespace nrl::verify {

enum class Kind : uint8_t { initial, loss, gradient, norm, weight };
std::string_view name_of(Kind kind);

/// The worst difference of one tensor (or of a scalar, whose name is empty) over all steps.
struct Check {
  Kind kind = Kind::gradient;
  std::string name;
  double error = 0, limit = 0;
  int64_t step = 0;
  int rank = -1;             ///< whose values differ most; -1: all ranks alike
  std::string problem = {};  ///< instead of an error: "2 ranks count each element"
  bool ok() const { return problem.empty() && error <= limit; }  // false for NaN
  /// For sorting: how many times the limit.
  double severity() const;
};

struct TrialResult {
  std::string grid;     ///< plan::grid_line()
  std::string options;  ///< "micro 2, accumulate 2, overlap", for the table of layouts
  std::string model;    ///< "llama, 29 k parameters, float32"
  int64_t sequences = 0, length = 0;
  Limits limits;
  std::vector<Check> checks;  ///< in the order of severity
  struct Step {
    double loss = 0, reference_loss = 0, norm = 0, reference_norm = 0;
  };
  std::vector<Step> steps;  ///< ends with the first step that has a failed check
  size_t tensors = 0;
  double seconds = 0;
  bool passed() const { return checks.empty() || checks.front().ok(); }
};

/// Collective; the result is the same on all ranks. `data` must have the samples of all steps. Errors that
/// concern the configuration end in AgreedExit.
TrialResult run_trial(comm::World& world, const ConfigResult& config, const data::TokenDataset& data,
                      int64_t steps);

}  // namespace nrl::verify
