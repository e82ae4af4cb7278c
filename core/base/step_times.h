#pragma once
// Times of the latest steps, from which the watchdogs of the host and of the device learn how long a step may
// take.

#include <cstddef>
#include <deque>

namespace nrl {

class StepTimes {
 public:
  static constexpr size_t history = 33;     ///< the median is taken of this many steps
  static constexpr size_t least_known = 3;  ///< with fewer there is none

  /// A step counts as three medians at most: one that hung and went on must not raise the limit.
  void add(double seconds);
  bool known() const { return seconds_.size() >= least_known; }
  /// 0: unknown.
  double median() const;
  /// So many medians, at least `least` seconds.
  double limit(double medians, double least) const;

 private:
  std::deque<double> seconds_;
};

}  // namespace nrl
