#pragma once
// Reads the curves of a run from metrics.jsonl, for reports.

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "apps/monitor/layers.h"
#include "core/io/json.h"

namespace nrl::monitor {

struct CurvePoint {
  int64_t step = 0;
  double value = 0;
  int64_t tokens = 0;  ///< of the run so far; 0 in rows of evaluations
  double time = 0;     ///< of the row, seconds since the epoch
};

/// One quantity of a run by step, ascending. Non-finite values have no point.
struct Curve {
  std::string key;  ///< in metrics.jsonl: "loss"
  std::vector<CurvePoint> points = {};

  /// Mean of the last `count` points (of all if there are fewer). Precondition: not empty.
  double tail_mean(size_t count) const;
  double median() const;
};

struct RunHistory {
  std::string name;  ///< as given on the command line
  Curve loss{"loss"}, val_loss{"val_loss"}, lr{"lr"}, grad_norm{"grad_norm"}, tokens_per_s{"tokens_per_s"};
  int64_t rows = 0;       ///< steps in the file
  int64_t skipped = 0;    ///< steps whose update was not applied
  int64_t last_step = 0;  ///< 0 without steps
  int64_t tokens = 0;     ///< up to the last step
  std::vector<double> sessions =
      {};  ///< their starts, seconds since the epoch, from run.json if there is one
  std::vector<LayerRow> layers = {};  ///< ascending
};

/// Adds a row of metrics.jsonl. Throws Error(Exit::data) for one without an integer "step", or with a value
/// of another kind.
void add_row(RunHistory& run, const JsonValue& row);

/// Calls `row` with every row of `path`, a metrics.jsonl or a directory with one. An incomplete last line is
/// ignored. Throws Error: `no_input` if the file is missing; `data`, with file and line, for an invalid line.
void for_each_row(const std::string& path, const std::function<void(const JsonValue&)>& row);

/// Reads `path`, as for_each_row() does, and run.json. Error(Exit::data) for a file without steps.
RunHistory load_history(const std::string& path);

/// A curve over equal ranges of steps, at most `buckets`, each with its mean, minimum and maximum.
struct CurveBucket {
  double step = 0, mean = 0, min = 0, max = 0;
};
std::vector<CurveBucket> bucketed(const Curve& curve, int64_t first_step, int64_t last_step, int buckets);

}  // namespace nrl::monitor
