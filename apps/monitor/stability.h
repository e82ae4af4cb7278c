#pragma once
// Detects instability in the loss and the gradient norm of a run. It reads nothing but the results of steps,
// which are the same on all ranks, so that all ranks find the same without a message. Nothing here has
// effects.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "apps/monitor/run_signals.h"
#include "core/config/config.h"

namespace nrl::monitor {

enum class Instability : uint8_t { spike, explosion, noise, drift };
inline constexpr int instability_count = 4;

/// The name of its alert: "loss_spike", "gradient_explosion", "loss_noise", "loss_drift".
std::string_view name_of(Instability kind);

/// The result of a step, equal on all ranks.
struct StepLoss {
  int64_t step = 0;
  double loss = 0, grad_norm = 0;
  bool skipped = false;  ///< not finite
  bool limited = false;  ///< skipped because of Stability::limits()
};

struct Finding {
  Instability kind;
  int64_t step = 0;          ///< at which the episode began
  std::string message = {};  ///< "loss 9.81, expected 2.43 +- 0.04 by the trend of the last 100 steps"
};

/// Compares every step with the `window` steps before it.
///
/// spike: loss - expected > max(8 deviations, 5 % of expected, 3 x the largest residual in the window).
/// explosion: grad_norm > spike_factor x median.
/// noise: s / |mean loss| > max(cv_threshold, 3 x its value `window` steps ago), where s is the robust
/// deviation that follows from the differences of successive losses.
/// drift: median - its least value so far > max(loss_increase x that, 3 deviations).
///
/// Here expected, deviation and residuals are RecentValues::Expected. Steps of spikes and explosions do not
/// enter the window, unless half a window of them follow one another: then the level has changed, and the
/// window begins anew. A kind is found again only after `window` steps without it.
class Stability {
 public:
  /// `loss_increase`: monitoring.alerting.thresholds.loss_increase.
  Stability(const StabilityConfig& config, double loss_increase);
  /// Adds a step. Returns the episodes that it begins. Skipped steps and numbers that are not finite are no
  /// findings and change nothing.
  std::vector<Finding> add(const StepLoss& at);
  /// Above these the next step is a spike or an explosion; unset in the first `window` steps.
  struct Limits {
    double loss = 0;
    double grad_norm = 0;  ///< 0: the norm has no limit
  };
  const std::optional<Limits>& limits() const { return limits_; }

 private:
  bool begins(Instability kind, int64_t step);
  void find_outliers(const StepLoss& at, std::vector<Finding>& out);
  void set_limits();
  void find_trends(int64_t step, std::vector<Finding>& out);

  StabilityConfig config_;
  double loss_increase_;
  RecentValues losses_, norms_, noise_;
  int64_t outliers_ = 0;  // in a row
  bool outlier_ = false;  // the step that is added
  RecentValues::Expected expected_;
  std::optional<Limits> limits_;
  std::optional<double> best_;
  std::array<int64_t, instability_count> last_;  // step of the last finding of each kind
};

}  // namespace nrl::monitor
