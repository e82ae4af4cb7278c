#pragma once
// The time that kernels take in steps.

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace nrl::monitor {

/// Adds up the seconds of kernels in steps. The totals that it reads grow with every kernel, also between
/// steps, and are cleared when a trace begins or ends.
class KernelTimes {
 public:
  using Totals = std::map<std::string, double>;  ///< seconds by name

  /// The totals were cleared.
  void restart() { taken_.clear(); }
  /// Counts what was added to the totals since the last call, or restart(), for a step in which `seconds`
  /// were spent computing. Returns it.
  Totals step(const Totals& now, double seconds);
  /// Leaves out what was added since: it belongs to no step.
  void skip(const Totals& now) { taken_ = now; }

  /// Kernel times summed over all steps, largest first.
  std::vector<std::pair<std::string, double>> kernels() const;
  /// Spent computing in these steps.
  double seconds() const { return seconds_; }

 private:
  Totals taken_, sum_;
  double seconds_ = 0;
};

}  // namespace nrl::monitor
