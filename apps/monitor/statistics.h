#pragma once
// Statistics over the steps of a run in constant memory.

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace nrl::monitor {

/// Mean and standard deviation of a stream: exact (Welford) over the first `window` values, then
/// exponentially weighted with weight 1/window.
class RunningStats {
 public:
  explicit RunningStats(int64_t window = 100) : window_(window) {}
  void add(double value);
  int64_t count() const { return count_; }
  double mean() const { return mean_; }
  double stddev() const;  ///< of the population

 private:
  int64_t window_, count_ = 0;
  double mean_ = 0, variance_ = 0;
};

/// Detects values of a stream that are far from the preceding ones.
class OutlierDetector {
 public:
  explicit OutlierDetector(int64_t window = 100, double threshold = 4.0)
      : stats_(window), threshold_(threshold) {}
  /// Compares `value` with the preceding ones, then adds it (clipped to 6 standard deviations, so that one
  /// outlier does not hide the next; non-finite values are not added). Returns the distance in standard
  /// deviations if it reaches the threshold after at least 20 values, else 0; NaN for a non-finite value.
  double add(double value);

 private:
  RunningStats stats_;
  double threshold_;
};

/// "!(+4.2s)" for an outlier, "!" for a non-finite value, else "".
std::string outlier_mark(double distance);

/// The denominator of MFU if it has to be measured. A measurement on a busy machine may be far too low, so it
/// is repeated at growing intervals and the maximum counts. A step that reaches a higher rate proves all
/// measurements wrong: the peak is unknown until one is above it.
class PeakEstimate {
 public:
  /// `flops`: FLOP/s of a rank at the start; 0: unknown. Without `measure` (FLOP/s) the estimate is constant.
  explicit PeakEstimate(double flops = 0, std::function<double()> measure = {})
      : measured_(flops), measure_(std::move(measure)) {}
  /// Reports that a step reached `flops` FLOP/s, `seconds` after the start. Measures again 1, 3, 9, ... s
  /// after the start, at most 8 times, and while the peak is unknown, at most 8 more times and once a second;
  /// runs shorter than a second are not slowed down.
  void add_step(double flops, double seconds);
  /// 0: unknown.
  double flops() const { return fastest_step_ > measured_ ? 0 : measured_; }

 private:
  double measured_, fastest_step_ = 0;
  std::function<double()> measure_;
  int repeats_ = 0, retries_ = 0;
  double next_ = 1, retry_ = 1;
};

/// A histogram of positive numbers from 1e-9 to 1e15 with bins 1 % wide: exact mean, quantiles within
/// 0.5 %. Values outside the range are counted in the first or last bin; non-positive and non-finite
/// ones are ignored.
class Histogram {
 public:
  Histogram();
  void add(double value);
  int64_t count() const { return count_; }
  double mean() const { return count_ == 0 ? 0 : sum_ / static_cast<double>(count_); }
  /// The q-quantile, q in [0, 1]; 0 if empty.
  double quantile(double q) const;
  double median() const { return quantile(0.5); }

 private:
  std::vector<uint32_t> bins_;
  int64_t count_ = 0;
  double sum_ = 0, least_ = 0, greatest_ = 0;
};

}  // namespace nrl::monitor
