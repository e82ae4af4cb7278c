#include "apps/monitor/run_signals.h"

#include <algorithm>
#include <cmath>

namespace nrl::monitor {
namespace {

constexpr int64_t first_fast_step = 10, last_fast_step = 50;  // of the baseline; earlier ones warm up
constexpr double least_rise = 0.05;                           // of a spike

}  // namespace

double median_of(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void RecentValues::add(double value) {
  if (!std::isfinite(value)) return;
  if (values_.size() < size_) {
    values_.push_back(value);
  } else {
    values_[next_] = value;
    next_ = (next_ + 1) % size_;
  }
}

RecentValues::Expected RecentValues::expected() const {
  const std::vector<double> values = in_order();
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  const double early = median_of({values.begin(), middle}), late = median_of({middle, values.end()});
  const auto count = static_cast<double>(values.size());
  const double slope = (late - early) / (count / 2), at_zero = early - slope * (count / 4);
  std::vector<double> off(values.size());
  for (size_t i = 0; i < off.size(); ++i)
    off[i] = std::abs(values[i] - at_zero - slope * (static_cast<double>(i) + 0.5));
  const double largest = *std::max_element(off.begin(), off.end());
  // Equal values have no deviation: the least one that can be told from rounding stands in.
  return {
      .value = at_zero + slope * (count + 0.5),
      .deviation = std::max(1.4826 * median_of(std::move(off)), 1e-9 * std::max(std::abs(late), least_size_)),
      .largest = largest};
}

std::vector<double> RecentValues::in_order() const {
  std::vector<double> out(values_.begin() + static_cast<std::ptrdiff_t>(next_), values_.end());
  out.insert(out.end(), values_.begin(), values_.begin() + static_cast<std::ptrdiff_t>(next_));
  return out;
}

Trend trend_of(const std::vector<double>& v) {
  const size_t count = v.size();
  if (count < 3) return {};
  double sum = 0;
  std::vector<double> slopes;
  slopes.reserve(count * (count - 1) / 2);
  for (size_t i = 0; i < count; ++i)
    for (size_t j = i + 1; j < count; ++j) {
      sum += v[j] > v[i] ? 1 : v[j] < v[i] ? -1 : 0;
      slopes.push_back((v[j] - v[i]) / static_cast<double>(j - i));
    }
  const auto n = static_cast<double>(count);
  const double deviation = std::sqrt(n * (n - 1) * (2 * n + 5) / 18);
  return {.z = sum == 0 ? 0 : (sum - std::copysign(1, sum)) / deviation,
          .change = median_of(std::move(slopes)) * (n - 1)};
}

RunSignals::AtStep RunSignals::add(const StepFacts& f) {
  AtStep out;
  const bool finite = std::isfinite(f.loss) && std::isfinite(f.grad_norm);
  if (loss_.full() && finite) {
    const RecentValues::Expected expected = loss_.expected();
    out.loss_z = expected.distance(f.loss);
    out.spike = f.loss > expected.value + least_rise * std::abs(expected.value) ? *out.loss_z : 0;
  }
  if (grad_norm_.full() && finite) {
    const double usual = grad_norm_.median();
    if (usual > 0) out.explosion = f.grad_norm / usual;
  }
  // They vary in proportion to their size, more upwards than downwards.
  if (log_grad_norm_.full() && f.grad_norm > 0 && std::isfinite(f.grad_norm))
    out.grad_norm_z = log_grad_norm_.expected().distance(std::log(f.grad_norm));
  if (log_step_ms_.full() && f.step_ms > 0)
    out.step_ms_z = log_step_ms_.expected().distance(std::log(f.step_ms));
  ++steps_;
  ++trend_steps_;
  loss_.add(f.loss);
  smooth_.add(f.loss);
  grad_norm_.add(f.grad_norm);
  log_grad_norm_.add(std::log(f.grad_norm));
  log_step_ms_.add(std::log(f.step_ms));
  step_ms_.add(f.step_ms);
  trend_loss_.add(f.loss);
  trend_tokens_.add(f.tokens_per_s);
  data_ms_ += f.data_ms;
  total_ms_ += f.step_ms;
  if (steps_ >= first_fast_step && steps_ <= last_fast_step) {
    first_.push_back(f.tokens_per_s);
    if (steps_ == last_fast_step) baseline_ = median_of(first_);
  } else if (steps_ > last_fast_step) {
    rates_.push_back(f.tokens_per_s);
  }
  return out;
}

RunSignals::Period RunSignals::period() {
  Period out;
  if (steps_ >= 2 * last_fast_step && smooth_.full()) {
    const double now = smooth_.median();
    if (!best_ || now < *best_) best_ = now;
    if (*best_ > 0) out.loss_increase = now / *best_ - 1;
  }
  if (!rates_.empty() && baseline_ > 0) {
    out.tokens_per_s = median_of(rates_);
    out.baseline = baseline_;
    out.speed = out.tokens_per_s / baseline_;
  }
  if (total_ms_ > 0 && steps_ >= first_fast_step) out.data_wait = data_ms_ / total_ms_;
  if (trend_loss_.full() && trend_steps_ >= 200) {
    out.loss = trend_of(trend_loss_.in_order());
    out.loss->change /= std::max(std::abs(trend_loss_.median()), 1e-300);
    out.tokens = trend_of(trend_tokens_.in_order());
    out.tokens->change /= std::max(trend_tokens_.median(), 1e-300);
    trend_steps_ = 0;
  }
  rates_.clear();
  data_ms_ = total_ms_ = 0;
  return out;
}

double RunSignals::validation(double loss) {
  if (!best_validation_ || loss < *best_validation_) best_validation_ = loss;
  return *best_validation_ > 0 ? loss / *best_validation_ - 1 : 0;
}

std::optional<double> RunSignals::step_seconds() const {
  return steps_ >= first_fast_step ? std::optional(step_ms_.median() * 1e-3) : std::nullopt;
}

}  // namespace nrl::monitor
