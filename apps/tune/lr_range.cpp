#include "apps/tune/lr_range.h"

#include <cmath>

namespace nrl::tune {
namespace {

constexpr double smoothing = 0.9, diverged_ratio = 4, turned_ratio = 1.05;
constexpr size_t least_points = 10;

}  // namespace

double range_lr(double from, double to, int64_t step, int64_t steps) {
  const double share = static_cast<double>(step - 1) / static_cast<double>(steps - 1);
  return from * std::pow(to / from, share);
}

double SmoothedLoss::add(double loss) {
  sum_ = smoothing * sum_ + (1 - smoothing) * loss;
  weight_ = smoothing * weight_ + (1 - smoothing);
  return sum_ / weight_;
}

bool diverged(double smoothed, double best) {
  return !std::isfinite(smoothed) || smoothed > best + (diverged_ratio - 1) * std::fabs(best);
}

std::optional<LrSuggestion> suggest(std::span<const LrPoint> points) {
  if (points.size() < least_points) return {};
  std::vector<double> smoothed;
  SmoothedLoss loss;
  for (const LrPoint& p : points) smoothed.push_back(loss.add(p.loss));
  LrSuggestion out;
  for (size_t i = 1; i < smoothed.size(); ++i)
    if (smoothed[i] < smoothed[out.turn]) out.turn = i;
  if (out.turn == 0) return {};
  double steepest = 0;
  for (size_t i = 1; i <= out.turn; ++i) {
    const double slope = (smoothed[i] - smoothed[i - 1]) / std::log(points[i].lr / points[i - 1].lr);
    if (slope < steepest) steepest = slope, out.steepest = i;
  }
  out.largest = points[out.turn].lr / 10;
  out.turned = diverged(smoothed.back(), smoothed[out.turn]) ||
               smoothed.back() > smoothed[out.turn] + (turned_ratio - 1) * std::fabs(smoothed[out.turn]);
  return out;
}

}  // namespace nrl::tune
