#include "apps/monitor/statistics.h"

#include <algorithm>
#include <cmath>

#include "core/base/error.h"

namespace nrl::monitor {
namespace {

constexpr int64_t outlier_warmup = 20;
constexpr double outlier_clip = 6;

// Bin i holds [least * 1.01^i, least * 1.01^(i+1)).
constexpr double least = 1e-9, greatest = 1e15;
constexpr double log_ratio = 0.009950330853168083;                              // log 1.01
constexpr auto bins = static_cast<size_t>(55.262042231857095 / log_ratio) + 1;  // log(greatest / least)

}  // namespace

void RunningStats::add(double value) {
  count_ += 1;
  const double weight = 1.0 / static_cast<double>(std::min(count_, window_));
  const double delta = value - mean_;
  mean_ += weight * delta;
  // With weight 1/count this is Welford's recurrence for the variance of the population.
  variance_ = (1 - weight) * (variance_ + weight * delta * delta);
}

double RunningStats::stddev() const {
  return std::sqrt(variance_);
}

double OutlierDetector::add(double value) {
  if (!std::isfinite(value)) return std::nan("");
  const double mean = stats_.mean(), deviation = stats_.stddev();
  // In a constant stream every rounding error would be an outlier.
  const bool ready = stats_.count() >= outlier_warmup && deviation > 1e-9 * std::abs(mean);
  if (!ready) {
    stats_.add(value);
    return 0;
  }
  const double distance = (value - mean) / deviation;
  stats_.add(mean + std::clamp(distance, -outlier_clip, outlier_clip) * deviation);
  return std::abs(distance) >= threshold_ ? distance : 0;
}

std::string outlier_mark(double distance) {
  if (std::isnan(distance)) return "!";
  return distance == 0 ? "" : fmt::format("!({:+.1f}s)", distance);
}

void PeakEstimate::add_step(double flops, double seconds) {
  constexpr int max_repeats = 8, max_retries = 8;
  if (!measure_) return;
  fastest_step_ = std::max(fastest_step_, flops);
  const bool due = repeats_ < max_repeats && seconds >= next_;
  const bool retry = fastest_step_ > measured_ && retries_ < max_retries && seconds >= retry_;
  if (!due && !retry) return;
  measured_ = std::max(measured_, measure_());
  (due ? repeats_ : retries_) += 1;
  while (next_ <= seconds) next_ *= 3;
  retry_ = seconds + 1;
}

Histogram::Histogram() : bins_(bins, 0) {}

void Histogram::add(double value) {
  if (!(value > 0) || std::isinf(value)) return;
  const double position = std::log(std::clamp(value, least, greatest) / least) / log_ratio;
  bins_[std::min(static_cast<size_t>(position), bins - 1)] += 1;
  least_ = count_ == 0 ? value : std::min(least_, value);
  greatest_ = count_ == 0 ? value : std::max(greatest_, value);
  count_ += 1;
  sum_ += value;
}

double Histogram::quantile(double q) const {
  if (count_ == 0) return 0;
  const auto rank = static_cast<int64_t>(std::clamp(q, 0.0, 1.0) * static_cast<double>(count_ - 1));
  int64_t below = 0;
  for (size_t bin = 0; bin < bins_.size(); ++bin) {
    below += bins_[bin];
    if (below > rank) {
      const double middle = least * std::exp((static_cast<double>(bin) + 0.5) * log_ratio);
      return std::clamp(middle, least_, greatest_);
    }
  }
  return greatest_;
}

}  // namespace nrl::monitor
