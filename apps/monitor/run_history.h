#pragma once
// Reads the curves of a run from metrics.jsonl, for reports.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace nrl::monitor {

struct CurvePoint {
  int64_t step = 0;
  double value = 0;
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
  Curve loss, val_loss, lr, grad_norm, tokens_per_s;
  int64_t rows = 0;       ///< steps in the file
  int64_t skipped = 0;    ///< steps whose update was not applied
  int64_t last_step = 0;  ///< 0 without steps
  int64_t tokens = 0;     ///< up to the last step
};

/// Reads `path`: a metrics.jsonl, or a directory with one (a run's log_dir). An incomplete last line is
/// ignored. Throws Error: `no_input` if the file is missing; `data`, with file and line, for an invalid line.
RunHistory load_history(const std::string& path);

/// A curve over equal ranges of steps, at most `buckets`, each with its mean, minimum and maximum.
struct CurveBucket {
  double step = 0, mean = 0, min = 0, max = 0;
};
std::vector<CurveBucket> bucketed(const Curve& curve, int64_t first_step, int64_t last_step, int buckets);

}  // namespace nrl::monitor
