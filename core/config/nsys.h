#pragma once
// The steps that Nsight Systems captures, from the variables of NeMo RL or from profiling.nsys.

#include <optional>
#include <string>
#include <vector>

#include "core/base/text.h"
#include "core/config/config.h"

namespace nrl {

inline constexpr const char* nsys_steps_variable = "NRL_NSYS_PROFILE_STEP_RANGE";
inline constexpr const char* nsys_workers_variable = "NRL_NSYS_WORKER_PATTERNS";

struct NsysWindow {
  StepRange steps;
  std::vector<std::string> workers;  ///< patterns, as of a shell
  std::string source;                ///< "NRL_NSYS_PROFILE_STEP_RANGE=2:3" or "profiling.nsys.steps: 2:3"

  /// "2:3"
  std::string text() const;
  /// True if a pattern matches the ranks of a run: policy_worker, or its names in NeMo RL.
  bool has_worker() const;
};

/// The variables win over the keys. Unset: nothing is captured. Throws Error (`usage`): only one of the
/// variables is set, or keys without the other, or the steps are no range.
std::optional<NsysWindow> nsys_window(const ProfilingConfig& config);

/// True if this process runs under Nsight Systems or another reader of NVTX ranges.
bool under_profiler();

}  // namespace nrl
