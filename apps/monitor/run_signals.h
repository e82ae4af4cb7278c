#pragma once
// Numbers that alerts are about, derived from the steps of a run.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "apps/monitor/facts.h"

namespace nrl::monitor {

/// Median of `values`; 0 if there are none.
double median_of(std::vector<double> values);

/// The last values of a number, compared with new ones.
class RecentValues {
 public:
  /// `least_size`: values are not smaller but by chance, as logarithms, whose absolute differences count.
  explicit RecentValues(size_t size, double least_size = 1e-291) : size_(size), least_size_(least_size) {}
  void add(double value);
  bool full() const { return values_.size() == size_; }
  double median() const { return median_of(values_); }
  /// The next value if the line through the medians of both halves goes on, the robust standard deviation
  /// (1.4826 MAD) of the values from that line, and their largest distance from it. Precondition: at least
  /// two values.
  struct Expected {
    double value = 0, deviation = 0, largest = 0;
    double distance(double v) const { return (v - value) / deviation; }
  };
  Expected expected() const;
  /// Oldest first.
  std::vector<double> in_order() const;

 private:
  size_t size_, next_ = 0;
  double least_size_;
  std::vector<double> values_;  // a ring
};

/// The Mann-Kendall test for a trend: z, positive where values rise, and the change from the first to the
/// last value by Sen's slope.
struct Trend {
  double z = 0, change = 0;
};
Trend trend_of(const std::vector<double>& values);

/// Call period() at evaluations, which are some seconds apart.
class RunSignals {
 public:
  /// Numbers of one step; a number is absent until enough steps came before.
  struct AtStep {
    std::optional<double> spike;  ///< loss above the recent median, in robust deviations; 0 if below by 5 %
    std::optional<double> explosion;                       ///< gradient norm / its recent median
    std::optional<double> loss_z, grad_norm_z, step_ms_z;  ///< Expected::distance()
  };
  AtStep add(const StepFacts& facts);

  /// Numbers of the steps since the last call.
  struct Period {
    std::optional<double> loss_increase;  ///< median loss of the last steps / the best one - 1
    std::optional<double> speed;          ///< median tokens/s / the median of steps 10 to 50 of this process
    std::optional<double> data_wait;      ///< fraction of the time
    double tokens_per_s = 0, baseline = 0;
    std::optional<Trend> loss, tokens;  ///< of the last 200 steps, each step in one period only
  };
  Period period();

  /// A validation loss relative to the best one, - 1.
  double validation(double loss);
  /// Median time of the recent steps in seconds.
  std::optional<double> step_seconds() const;

 private:
  RecentValues loss_{100}, grad_norm_{100}, step_ms_{100}, log_grad_norm_{100, 1}, log_step_ms_{100, 1},
      smooth_{50}, trend_loss_{200}, trend_tokens_{200};
  int64_t steps_ = 0, trend_steps_ = 0;
  std::optional<double> best_, best_validation_;
  std::vector<double> first_, rates_;  // tokens/s: of steps 10 to 50; of the period
  double baseline_ = 0, data_ms_ = 0, total_ms_ = 0;
};

}  // namespace nrl::monitor
