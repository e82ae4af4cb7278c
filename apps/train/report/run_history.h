#pragma once
// Reads metrics.jsonl back: the curves of a run, for reports.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace nrl::train {

struct CurvePoint {
  int64_t step = 0;
  double value = 0;
};

/// One quantity of a run over its steps, ascending. Values that are not finite have no point.
struct Curve {
  std::string key;    ///< in metrics.jsonl: "loss"
  std::string label;  ///< for people: "training loss"
  std::vector<CurvePoint> points;

  double last() const { return points.back().value; }
  /// Mean of the last `count` points (of all when there are fewer). Precondition: not empty.
  double tail_mean(size_t count) const;
  double median() const;
};

struct RunHistory {
  std::string name;  ///< as given on the command line
  Curve loss, val_loss, lr, grad_norm, tokens_per_s;
  int64_t rows = 0;       ///< steps in the file
  int64_t skipped = 0;    ///< steps whose update was not applied
  int64_t last_step = 0;  ///< 0 without steps
  int64_t tokens = 0;     ///< seen up to the last step
};

/// Reads `path`: a metrics.jsonl, or a directory that holds one (a run's log_dir). An incomplete last line is
/// ignored. Throws Error: `no_input` when the file is missing; `data`, with file and line, for a line that is
/// not a row of metrics.
RunHistory load_history(const std::string& path);

/// At most `buckets` points: equal ranges of steps, each with its mean, least and greatest value.
struct CurveBucket {
  double step = 0, mean = 0, min = 0, max = 0;
};
std::vector<CurveBucket> bucketed(const Curve& curve, int64_t first_step, int64_t last_step, int buckets);

}  // namespace nrl::train
