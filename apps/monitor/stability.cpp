#include "apps/monitor/stability.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include <spdlog/fmt/fmt.h>

namespace nrl::monitor {
namespace {

constexpr double outlier_deviations = 8, outlier_rise = 0.05, beyond_largest = 3;
constexpr double noise_growth = 3, drift_deviations = 3;
constexpr int64_t never = -1'000'000'000;

/// Robust standard deviation of the values without their trend, from the differences of successive ones.
double noise_of(const std::vector<double>& values) {
  std::vector<double> differences;
  for (size_t i = 1; i < values.size(); ++i) differences.push_back(std::abs(values[i] - values[i - 1]));
  return 1.4826 * median_of(std::move(differences)) / std::sqrt(2.0);
}

}  // namespace

std::string_view name_of(Instability kind) {
  constexpr std::string_view names[] = {"loss_spike", "gradient_explosion", "loss_noise", "loss_drift"};
  return names[static_cast<size_t>(kind)];
}

Stability::Stability(const StabilityConfig& config, double loss_increase)
    : config_(config),
      loss_increase_(loss_increase),
      losses_(static_cast<size_t>(config.window)),
      norms_(static_cast<size_t>(config.window)),
      noise_(static_cast<size_t>(config.window)) {
  last_.fill(never);
}

bool Stability::begins(Instability kind, int64_t step) {
  int64_t& last = last_[static_cast<size_t>(kind)];
  return step - std::exchange(last, step) > config_.window;
}

void Stability::set_limits() {
  limits_.reset();
  if (!losses_.full()) return;
  expected_ = losses_.expected();
  const double rise =
      std::max({outlier_deviations * expected_.deviation, outlier_rise * std::abs(expected_.value),
                beyond_largest * expected_.largest});
  limits_ = Limits{.loss = expected_.value + rise, .grad_norm = config_.spike_factor * norms_.median()};
}

void Stability::find_outliers(const StepLoss& at, std::vector<Finding>& out) {
  outlier_ = at.limited;
  if (at.loss > limits_->loss) {
    outlier_ = true;
    if (begins(Instability::spike, at.step))
      out.push_back({Instability::spike, at.step,
                     fmt::format("loss {:.4g}, expected {:.4g} +- {:.2g} by the trend of the last {} steps",
                                 at.loss, expected_.value, expected_.deviation, config_.window)});
  }
  if (limits_->grad_norm > 0 && at.grad_norm > limits_->grad_norm) {
    outlier_ = true;
    if (begins(Instability::explosion, at.step))
      out.push_back(
          {Instability::explosion, at.step,
           fmt::format("gradient norm {:.4g}, {:.1f} times the median of the last {} steps", at.grad_norm,
                       at.grad_norm / limits_->grad_norm * config_.spike_factor, config_.window)});
  }
}

void Stability::find_trends(int64_t step, std::vector<Finding>& out) {
  const std::vector<double> losses = losses_.in_order();
  const double mean = std::accumulate(losses.begin(), losses.end(), 0.0) / static_cast<double>(losses.size());
  const double noise = noise_of(losses) / std::max(std::abs(mean), 1e-300);
  const double before = noise_.full() ? noise_.in_order().front() : noise;
  if (noise > std::max(config_.cv_threshold, noise_growth * before) && begins(Instability::noise, step))
    out.push_back(
        {Instability::noise, step,
         fmt::format("the noise of the loss is {:.1f} % of its mean in the last {} steps, and was {:.1f} % "
                     "in the steps before",
                     100 * noise, config_.window, 100 * before)});
  noise_.add(noise);
  const double median = median_of(losses);
  if (best_ && *best_ > 0 &&
      median - *best_ > std::max(loss_increase_ * *best_, drift_deviations * expected_.deviation) &&
      begins(Instability::drift, step))
    out.push_back(
        {Instability::drift, step,
         fmt::format("the median loss of the last {} steps is {:.4g}, {:.1f} % above the least one, "
                     "{:.4g}",
                     config_.window, median, 100 * (median / *best_ - 1), *best_)});
  best_ = std::min(median, best_.value_or(median));
}

std::vector<Finding> Stability::add(const StepLoss& at) {
  std::vector<Finding> out;
  if (at.skipped || !std::isfinite(at.loss) || !std::isfinite(at.grad_norm)) return out;
  if (limits_) {
    find_outliers(at, out);
    outliers_ = outlier_ ? outliers_ + 1 : 0;
    if (outlier_ && outliers_ <= config_.window / 2) return out;
    if (outlier_) {
      losses_ = RecentValues(static_cast<size_t>(config_.window));
      norms_ = losses_;
      outliers_ = 0;
    }
  }
  losses_.add(at.loss);
  norms_.add(at.grad_norm);
  set_limits();
  if (limits_) find_trends(at.step, out);
  return out;
}

}  // namespace nrl::monitor
