#include "apps/monitor/leak_detector.h"

#include <algorithm>
#include <cmath>

#include <spdlog/fmt/fmt.h>

#include "core/base/text.h"

namespace nrl::monitor {
namespace {

constexpr size_t max_window = 48;  // 1128 pairs: the slope takes about 10 us
constexpr double mb = 1e6, gb = 1e9;

constexpr double count_slope = 0.1, count_ratio = 1.5, count_rise = 16;

}  // namespace

LeakDetector::LeakDetector(std::string what, const MemoryLeakConfig& limits)
    : what_(std::move(what)), limits_(limits) {}

LeakDetector LeakDetector::of_counts(std::string what) {
  MemoryLeakConfig limits;
  limits.slope_mb_per_step = count_slope / mb;
  limits.ratio = count_ratio;
  limits.step_increase_gb.reset();
  LeakDetector out(std::move(what), limits);
  out.counts_ = true;
  return out;
}

std::string LeakDetector::amount(double total) const {
  if (counts_) return fmt::format("{:.0f}", total);
  return human_bytes(static_cast<uint64_t>(std::max(total, 0.0)));
}

// "heap in use grew by 12 MiB": of the parts, the one that grew most between two samples.
std::string LeakDetector::grown_part(const MemorySample& before, const MemorySample& now) const {
  const MemorySample::Part* most = nullptr;
  int64_t growth = 0;
  for (const MemorySample::Part& part : now.parts)
    for (const MemorySample::Part& old : before.parts)
      if (old.name == part.name && part.bytes - old.bytes > growth) {
        growth = part.bytes - old.bytes;
        most = &part;
      }
  return most ? fmt::format("{} grew by {}", most->name, amount(static_cast<double>(growth)))
              : "none of its known parts grew";
}

std::optional<Leak> LeakDetector::add(const MemorySample& sample) {
  std::optional<Leak> warning;
  if (!window_.empty()) warning = step_increase(sample);
  if (count_ == 0) first_ = sample;
  if (++count_ <= limits_.min_samples) first_sum_ += static_cast<double>(sample.total);
  window_.push_back(sample);
  const size_t size = std::max(max_window, static_cast<size_t>(limits_.min_samples));
  if (window_.size() > size) window_.pop_front();
  // Often enough to notice a leak, and rare enough to cost nothing.
  if (!warning && count_ % limits_.min_samples == 0) {
    warning = slope(sample);
    if (!warning) warning = ratio(sample);
  }
  return warning;
}

std::optional<Leak> LeakDetector::slope(const MemorySample& now) {
  if (!limits_.slope_mb_per_step || !slope_.due(now.total)) return std::nullopt;
  std::vector<double> slopes;
  slopes.reserve(window_.size() * (window_.size() - 1) / 2);
  const size_t stride = (window_.size() + max_window - 1) / max_window;
  for (size_t i = 0; i < window_.size(); i += stride)
    for (size_t j = i + stride; j < window_.size(); j += stride)
      slopes.push_back(static_cast<double>(window_[j].total - window_[i].total) /
                       static_cast<double>(window_[j].step - window_[i].step));
  if (slopes.empty()) return std::nullopt;
  // Two thirds of the slopes are at least this. A rise in the middle of the window is in half of the pairs.
  const auto third = slopes.begin() + static_cast<std::ptrdiff_t>(slopes.size() / 3);
  std::nth_element(slopes.begin(), third, slopes.end());
  if (!(*third > *limits_.slope_mb_per_step * mb)) return std::nullopt;
  slope_.warned = now.total;
  if (counts_)
    return leak(fmt::format("{} grows by {:.3g} per step: {} in steps {} to {}, now {}", what_, *third,
                            grown_part(window_.front(), now), window_.front().step, now.step, now.total),
                window_.front(), now);
  return leak(
      fmt::format("{} grows by {:.3g} MB per step (monitoring.memory_leak.slope_mb_per_step: {}): {} in "
                  "steps {} to {}, now {}",
                  what_, *third / mb, *limits_.slope_mb_per_step, grown_part(window_.front(), now),
                  window_.front().step, now.step, amount(static_cast<double>(now.total))),
      window_.front(), now);
}

std::optional<Leak> LeakDetector::ratio(const MemorySample& now) {
  const int64_t n = limits_.min_samples;
  if (!limits_.ratio || !ratio_.due(now.total) || count_ < 2 * n) return std::nullopt;
  double sum = 0;
  for (auto it = window_.end() - n; it != window_.end(); ++it) sum += static_cast<double>(it->total);
  if (!(sum > *limits_.ratio * first_sum_)) return std::nullopt;
  if (counts_ && sum - first_sum_ < count_rise * static_cast<double>(n)) return std::nullopt;
  ratio_.warned = now.total;
  if (counts_)
    return leak(fmt::format("{} is {:.2f} times what it was after step {}: {}, now {}", what_,
                            sum / first_sum_, first_.step, grown_part(first_, now), now.total),
                first_, now);
  return leak(
      fmt::format(
          "{} is {:.2f} times what it was after step {} (monitoring.memory_leak.ratio: {}): {}, now {}",
          what_, sum / first_sum_, first_.step, *limits_.ratio, grown_part(first_, now),
          amount(static_cast<double>(now.total))),
      first_, now);
}

std::optional<Leak> LeakDetector::step_increase(const MemorySample& now) {
  const MemorySample& before = window_.back();
  const double rise =
      static_cast<double>(now.total - before.total) / static_cast<double>(now.step - before.step);
  if (!limits_.step_increase_gb || !(rise > *limits_.step_increase_gb * gb) || !step_increase_.due(now.total))
    return std::nullopt;
  step_increase_.warned = now.total;
  return leak(
      fmt::format("{} rose by {:.3g} GB in step {} (monitoring.memory_leak.step_increase_gb: {}): {}, now {}",
                  what_, rise / gb, now.step, *limits_.step_increase_gb, grown_part(before, now),
                  amount(static_cast<double>(now.total))),
      before, now);
}

}  // namespace nrl::monitor
