#pragma once
// Finds the causes of lost time in a profile, and the keys that may mend them.

#include <string>
#include <vector>

#include "apps/profile/profile.h"
#include "core/config/config.h"

namespace nrl::profile {

/// A cause counts from its threshold on. Shares of the step, unless said otherwise.
struct Thresholds {
  double utilization = 0.80, poor_utilization = 0.50;  ///< below: medium, high
  double communication = 0.20;                         ///< busy, hidden or not
  double slow_kernel_ms = 1.0;                         ///< of a call of a kernel, on a device
  double data = 0.02;                                  ///< waiting for the loader
  double exposed = 0.02;                               ///< communication of one kind of group
  double bubble = 0.05, imbalance = 0.03, recompute = 0.03, offload = 0.03;
  double gemm = 0.60;      ///< GEMMs below this share of what they could reach
  double gaps = 0.05;      ///< host and launch
  double update = 0.10;    ///< with several data-parallel ranks
  double tail = 1.1;       ///< p99 / p50 of the step
  double straggler = 0.9;  ///< own work of the fastest rank of its pipeline stage / a rank's
  double starved = 0.05;   ///< without a processor
};

/// Overrides to try for a finding.
struct Candidate {
  std::vector<std::string> overrides;
  bool changes_numbers = false;  ///< what is computed differs, not just when and where
  double predicted_s = 0;        ///< of a step, from the profile alone; 0: the model must say
};

struct Verdict {
  Finding finding;                    ///< without a prediction
  std::vector<Candidate> candidates;  ///< in order of preference; empty: no key mends it
};

/// Findings by the seconds that they cost, the most first. `config` is the one of the profile. Candidates may
/// be refused by the checks of a configuration.
std::vector<Verdict> find_verdicts(const Profile& profile, const Config& config,
                                   const Thresholds& thresholds = {});

}  // namespace nrl::profile
