#pragma once
// Two profiles beside each other, and the gate that a change must pass.

#include <string>
#include <string_view>
#include <vector>

#include "apps/profile/profile.h"
#include "core/base/sample.h"
#include "core/config/diff.h"
#include "core/io/json.h"

namespace nrl::profile {

/// The exit code of a gate that found a regression.
inline constexpr int exit_regression = 3;

/// A figure of both profiles. Ratios are after / before.
struct Metric {
  std::string name;
  double before = 0, after = 0;
  Interval ratio;  ///< 95 %; of an exact figure the ratio itself
  bool lower_is_better = true;

  /// By which share it got worse; negative: better.
  double worse() const;
  Interval worse_interval() const;
};

/// Seconds of a part of the step.
struct Change {
  std::string name;
  double before = 0, after = 0;
  double difference() const { return after - before; }
};

/// The promise of a verdict of the baseline for keys that were changed.
struct Prediction {
  std::vector<std::string> overrides;  ///< empty: no verdict named the keys
  double step_s = 0;                   ///< of a step
};

struct Comparison {
  std::vector<Metric> metrics;
  std::vector<Change> split, operations;  ///< the differences of each add up to the step's; largest first
  std::vector<KeyDifference> keys;        ///< that differ in the configurations
  std::vector<KeyDifference> facts;       ///< version, hosts, devices, ranks, threads
  std::string unreadable;                 ///< why the configurations cannot be compared; empty: they can
  Prediction prediction;                  ///< empty until it is sought
  size_t steps_before = 0, steps_after = 0;

  /// Fails with Exit::usage and the names for another one.
  const Metric& metric(std::string_view name) const;
};

/// `before` is the baseline. Profiles of different machines are refused with Exit::usage unless
/// `other_machine`.
Comparison compare(const Profile& before, const Profile& after, bool other_machine = false);

/// True if the configurations differ in more than places of files and what is recorded: then a verdict may
/// have named the keys.
bool changes_runs(const Comparison& comparison);
/// The finding all of whose overrides were made, the most of them if there are several.
Prediction prediction_of(const std::vector<Finding>& findings, const Comparison& comparison);

/// The verdict on a figure that got worse by `worse` (0.05: 5 %) with this 95 % interval. `regression`: the
/// point is beyond `allowed` and the interval excludes 0. `unclear`: the interval is wider than `allowed` and
/// contains it. Regressions of twice `allowed` and more are found most reliably.
enum class Gate { ok, unclear, regression };
Gate judge(double worse, const Interval& interval, double allowed);

/// "steps take 12.3 ms, 10.7 ms in the first window (+15.0 %); most of it: data +1.2 ms" where judge() finds
/// that the step of a later window grew by more than `allowed`; else empty.
std::string slower_text(const Profile& before, const Profile& after, double allowed);

/// Tables, and what changed.
std::string text(const Comparison& comparison);
/// The verdict in one sentence. `allowed` as for judge().
std::string gate_text(const Comparison& comparison, const Metric& metric, double allowed);
JsonValue to_json(const Comparison& comparison);
/// The same as a page without scripts and other files.
std::string html_page(const Comparison& comparison);

}  // namespace nrl::profile
