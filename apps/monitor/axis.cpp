#include "apps/monitor/axis.h"

#include <algorithm>

#include "core/base/error.h"
#include "core/base/text.h"

namespace nrl::monitor {
namespace {

// Converts wall-clock times to seconds of training.
struct Clock {
  std::vector<double> starts;  // of sessions, ascending
  std::vector<double> before;  // seconds of training before each of them

  explicit Clock(const RunHistory& run) {
    starts = run.sessions;
    if (starts.empty() && !run.loss.points.empty()) starts.push_back(run.loss.points.front().time);
    std::sort(starts.begin(), starts.end());
    double trained = 0;
    for (size_t i = 0; i < starts.size(); ++i) {
      before.push_back(trained);
      double last = starts[i];
      for (const CurvePoint& p : run.loss.points)
        if (i + 1 == starts.size() || p.time < starts[i + 1]) last = std::max(last, p.time);
      trained += last - starts[i];
    }
  }

  double trained(double time) const {
    const auto after = std::upper_bound(starts.begin(), starts.end(), time);
    if (after == starts.begin()) return 0;
    const auto i = static_cast<size_t>(after - starts.begin()) - 1;
    return before[i] + time - starts[i];
  }
};

// The tokens up to `step`: rows of evaluations have none of their own.
int64_t tokens_at(const RunHistory& run, int64_t step) {
  const auto& points = run.loss.points;
  const auto after = std::upper_bound(points.begin(), points.end(), step,
                                      [](int64_t s, const CurvePoint& p) { return s < p.step; });
  return after == points.begin() ? 0 : std::prev(after)->tokens;
}

std::string number_text(By by, int64_t value) {
  if (by == By::tokens) return human_count(static_cast<double>(value));
  if (by == By::hours) return fmt::format("{:.4g}", static_cast<double>(value) / axis_unit(by));
  return std::to_string(value);
}

constexpr const char* suffixes[] = {"", " tokens", " h"};

}  // namespace

std::vector<RunHistory> placed_by(std::span<const RunHistory> runs, By by) {
  std::vector<RunHistory> out(runs.begin(), runs.end());
  if (by == By::steps) return out;
  for (size_t r = 0; r < out.size(); ++r) {
    RunHistory& run = out[r];
    const Clock clock(run);
    for (Curve* curve : {&run.val_loss, &run.lr, &run.grad_norm, &run.tokens_per_s, &run.loss})
      for (CurvePoint& p : curve->points)
        p.step =
            by == By::tokens ? tokens_at(runs[r], p.step) : static_cast<int64_t>(clock.trained(p.time) * 1e3);
  }
  return out;
}

double axis_unit(By by) {
  return by == By::hours ? 3.6e6 : 1;
}

std::string axis_text(By by, int64_t value) {
  return (by == By::steps ? "step " : "") + number_text(by, value) + suffixes[static_cast<int>(by)];
}

std::string axis_range(By by, int64_t first, int64_t last) {
  return fmt::format("{}{} to {}{}", by == By::steps ? "step " : "", number_text(by, first),
                     number_text(by, last), suffixes[static_cast<int>(by)]);
}

}  // namespace nrl::monitor
