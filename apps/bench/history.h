#pragma once
// Figures of benchmarks over commits: a file of lines, one per figure, the search for changes in it, and the
// gate between two of them.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "apps/profile/compare.h"
#include "core/base/sample.h"
#include "core/io/json.h"

namespace nrl::bench {

/// One figure of one process. Smaller is better.
struct HistoryEntry {
  std::string metric;   ///< "step_ms", "planned_bytes"
  std::string config;   ///< file and overrides
  std::string machine;  ///< processor or GPU, cores, instruction set, ranks: other machines do not compare
  std::string commit;
  double time = 0;  ///< seconds since the epoch
  double value = 0;
  Interval interval;  ///< 95 %; of an exact figure the value
  double probe = 0;  ///< FLOP/s that the process reached in matmuls alone; 0: the value does not depend on it
  bool exact() const { return probe <= 0; }
  /// The value, of a time in units of the machine's speed at that moment.
  double relative() const { return exact() ? value : value * probe; }
};

JsonValue to_json(const HistoryEntry& entry);
/// Appends lines to the file, which is created. Exit::io or Exit::cannot_create.
void append_history(const std::string& path, std::span<const HistoryEntry> entries);
/// Reads a file. Exit::no_input without one, Exit::data with file and line for anything else than entries.
std::vector<HistoryEntry> load_history(const std::string& path);

/// The entry from which on the values are different: the division whose parts, of at least five values each,
/// differ most in their ranks.
struct ChangePoint {
  size_t at = 0;     ///< the first of the later values
  double ratio = 1;  ///< medians, after / before
  double p = 1;      ///< of one as large among permutations of the values
};
/// Set where p < 0.01 and the last three values lie on the later side. Values must be positive.
std::optional<ChangePoint> find_change(std::span<const double> values);

/// A table of all series (metric, configuration, machine) with their trends and changes.
std::string history_text(std::span<const HistoryEntry> entries);

/// Two series of the gate, the i-th entries of which were measured one after another.
struct GateRow {
  std::string name;  ///< metric and configuration
  size_t pairs = 0;  ///< that count
  double worse = 0;  ///< by which share the figure grew
  Interval interval;
  double allowed = 0;
  using Verdict = profile::Gate;
  Verdict verdict = Verdict::unclear;
};
/// Pairs the entries of equal series in both files. A pair in which the machine's probe is more than a tenth
/// below the best one is left out. `allowed`: of times, 0.05 for 5 %; exact figures may grow by 1 %.
/// Exit::usage where no series is in both.
std::vector<GateRow> gate(std::span<const HistoryEntry> before, std::span<const HistoryEntry> after,
                          double allowed);
std::string text(std::span<const GateRow> rows);

}  // namespace nrl::bench
