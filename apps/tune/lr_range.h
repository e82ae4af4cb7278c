#pragma once
// The choice of a learning rate from a range test: losses of steps whose learning rate grows exponentially.
// Smith, Cyclical Learning Rates for Training Neural Networks (2017), section 3.3.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace nrl::tune {

struct LrPoint {
  double lr = 0, loss = 0;
};

/// The learning rate of step `step` (from 1) of `steps` >= 2, from `from` to `to` in equal ratios.
double range_lr(double from, double to, int64_t step, int64_t steps);

/// The losses smoothed by an exponential mean of factor 0.9, corrected for its start.
class SmoothedLoss {
 public:
  double add(double loss);

 private:
  double sum_ = 0, weight_ = 0;
};

/// True once the test has seen enough: the smoothed loss is above four times the best one, or not finite.
bool diverged(double smoothed, double best);

struct LrSuggestion {
  size_t steepest = 0;  ///< index of the point where the smoothed loss falls most per ratio of the rates
  size_t turn = 0;      ///< index of the point with the smallest smoothed loss
  double largest = 0;   ///< a tenth of the rate at `turn`: the largest one to train with
  bool turned = false;  ///< the loss rose after `turn`: the range was wide enough
};

/// Unset where the loss never falls, or of fewer than 10 points. Points in the order of their rates.
std::optional<LrSuggestion> suggest(std::span<const LrPoint> points);

}  // namespace nrl::tune
