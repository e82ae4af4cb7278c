#pragma once
// nrl-train plan --what-if: the same plan with other keys, side by side.

#include <string>
#include <vector>

#include "apps/planner/planned_run.h"

namespace nrl::planner {

/// A plan of `plan --what-if`.
struct Variant {
  std::string name;                  ///< "as configured", or the keys
  JsonValue json = {};               ///< as `plan --json` of these keys; null if it was refused
  std::string refused = {};          ///< why it cannot be planned; empty: it can
  int64_t memory = 0, capacity = 0;  ///< bytes of the rank that needs most; 0: the device's are unknown
  RunEstimate estimate = {};
};

/// Plans and estimates `run`, which must be complete; uses up its plans.
Variant variant_of(std::string name, PlannedRun& run);
/// `keys`: one of the command line's --what-if: "key=value ..." over the keys of `base`. `device=NAME` and
/// `trainer=NAME` are these options. Fails with Exit::usage for a word without '='.
Variant variant_of(const PlanRequest& base, const std::string& keys);

/// A row for each.
std::string table(const std::vector<Variant>& variants);

}  // namespace nrl::planner
