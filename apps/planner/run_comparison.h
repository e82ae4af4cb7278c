#pragma once
// `nrl-train report --predicted`: the estimate of a run beside what the run measured, and a profile of
// measured rates (machine::Profile) from it, so that every run calibrates the next plan.

#include <optional>
#include <string>
#include <vector>

#include "apps/machine/profile.h"
#include "apps/planner/planned_run.h"

namespace nrl::planner {

struct RunToCompare {
  std::string log_dir;
  /// As in PlanRequest. auto: as the run was configured.
  std::string device = "auto";
  std::string profile = {};
};

/// A part of a step in seconds, or the memory of a rank in bytes.
struct ComparedPart {
  std::string name;
  std::optional<double> predicted = {}, measured = {};
  std::string source = {};  ///< of the measured value: "metrics.jsonl"
};

struct RunComparison {
  int world = 1;
  std::string device;
  predict::StepEstimate estimate = {};
  std::vector<ComparedPart> parts = {};  ///< the whole step first
  ComparedPart memory = {};
  std::vector<std::string> without = {};  ///< RunEstimate::without
  /// The rates that the run's last window of recorded steps gives; unset without a window.
  std::optional<machine::Profile> profile = {};
  std::vector<std::string> left_out = {};  ///< operations that the profile has no times of, with the reason
};

/// Estimates the run of a log directory from its resolved configuration, and reads its metrics.jsonl,
/// memory.json and the last window of profiling. Fails with Exit::no_input where one of the first three is
/// missing, with Exit::usage where there is no estimate.
RunComparison compare_with_run(const RunToCompare& run);

std::string text_of(const RunComparison& comparison);

}  // namespace nrl::planner
