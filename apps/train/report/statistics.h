#pragma once
// Statistics over the steps of a run in constant memory.

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace nrl::train {

/// Mean and standard deviation of a stream: exact (Welford) over the first `window` values, exponentially
/// forgetting with weight 1/window after them.
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

/// Tells which values of a stream lie far from what came before them.
class OutlierDetector {
 public:
  explicit OutlierDetector(int64_t window = 100, double threshold = 4.0)
      : stats_(window), threshold_(threshold) {}
  /// Judges `value` against the earlier ones, then takes it in (at most 6 standard deviations of it, so that
  /// one outlier does not hide the next; values that are not finite are left out). Gives the distance in
  /// standard deviations when it is at least the threshold and 20 values came before; 0 for an ordinary
  /// value; NaN for one that is not finite.
  double add(double value);

 private:
  RunningStats stats_;
  double threshold_;
};

/// "!(+4.2s)" for an outlier, "!" for a value that is not finite, "" for an ordinary one.
std::string outlier_mark(double distance);

/// The denominator of MFU where it has to be measured. One measurement on a busy machine may be far too low,
/// so that it is repeated at growing distances and the best one counts; a step that was faster still shows
/// that the machine can do more, and its rate becomes the peak.
class PeakEstimate {
 public:
  /// `flops`: FLOP/s of a rank at the start, 0 when unknown. Without `measure` (FLOP/s) it stays as it is.
  explicit PeakEstimate(double flops = 0, std::function<double()> measure = {})
      : flops_(flops), measure_(std::move(measure)) {}
  /// A step reached `flops` FLOP/s, `seconds` after the start. Measures again 1, 3, 9, ... s after the start,
  /// at most 8 times: a run shorter than a second pays nothing.
  void add_step(double flops, double seconds);
  double flops() const { return flops_; }

 private:
  double flops_;
  std::function<double()> measure_;
  int repeats_ = 0;
  double next_ = 1;
};

/// A histogram of positive numbers from 1e-9 to 1e15 with bins 1 % wide: the exact mean, and quantiles within
/// 0.5 % of a value, however many values come. Values outside the range go to the end bins, and what is not
/// a positive number is left out.
class Histogram {
 public:
  Histogram();
  void add(double value);
  int64_t count() const { return count_; }
  double mean() const { return count_ == 0 ? 0 : sum_ / static_cast<double>(count_); }
  /// The value below which the share `q` in [0, 1] lies; 0 when empty.
  double quantile(double q) const;
  double median() const { return quantile(0.5); }

 private:
  std::vector<uint32_t> bins_;
  int64_t count_ = 0;
  double sum_ = 0, least_ = 0, greatest_ = 0;
};

}  // namespace nrl::train
