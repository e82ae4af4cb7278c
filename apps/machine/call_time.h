#pragma once
// The time of one call of an op on a device, from its cost and the rates of the device's model.

#include <array>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "apps/machine/device_models.h"
#include "apps/machine/profile.h"
#include "apps/machine/seconds.h"
#include "core/ops/cost.h"
#include "parallel/comm/ledger.h"

namespace nrl::machine {

/// Factors on the assumed rates.
struct Scenario {
  double arithmetic = 1, bandwidth = 1;
};
inline constexpr Scenario likely{}, poor{.arithmetic = 0.90, .bandwidth = 0.88},
    good{.arithmetic = 1.06, .bandwidth = 1.07};

/// Times of a call's arithmetic and of its memory traffic; the longer one limits it.
struct CallTime {
  double arithmetic = 0, memory = 0;  ///< seconds
  double seconds() const { return arithmetic > memory ? arithmetic : memory; }
};
/// The estimated time of one call, without the gaps between kernels.
CallTime estimate(const DeviceModel& gpu, const ops::Call& call, const Scenario& scenario);

/// The same of a memory-bound op that moves so many bytes, at likely rates.
double memory_seconds(const DeviceModel& gpu, const char* op, double bytes);

/// The time of copies beside an operation of data-parallel or tensor-parallel ranks on `bytes`; 0 where it
/// moves them in their places.
double copy_seconds(const DeviceModel& gpu, comm::Purpose purpose, comm::Op op, double bytes,
                    const Scenario& scenario);

/// Times of calls on a device: measured ones of a profile by their keys; for others the model, times the
/// median of measured over modeled times of the four nearest calls of the same op and type, or else of the
/// same kind of work, type and pass. Without a profile the model alone.
class CallTimes {
 public:
  /// `profile`: null for none; must be of the device, and may be destroyed afterwards.
  CallTimes(const DeviceModel& device, const Profile* profile, const Scenario& scenario = likely);

  /// Without the gaps between kernels.
  Seconds of(const ops::Call& call) const;
  /// Seconds between the kernels of a call.
  double gaps(const ops::Call& call) const;
  /// Seconds in which the host of another trainer starts a call, or an operation of a group. 0 where it is
  /// never late: ours, and with CUDA graphs.
  double host(const ops::Call& call) const;
  double host_of_operation() const { return device_.kernels ? device_.host_operation : 0; }
  /// The host of another trainer waits for the result of the call.
  bool host_waits(const ops::Call& call) const;
  double copies(comm::Purpose purpose, comm::Op op, double bytes) const {
    return copy_seconds(device_, purpose, op, bytes, scenario_);
  }
  const DeviceModel& device() const { return device_; }

 private:
  using Size = std::array<double, 3>;  // logarithms
  struct Point {
    Size at;
    double ratio;  // measured over modeled
  };
  using Kind = std::tuple<ops::Work, std::string, DType, bool>;  // the op may be empty: all of them
  static Size size_of(const CallKey& key);
  double ratio(const CallKey& key, ops::Work work) const;

  DeviceModel device_;
  Scenario scenario_;
  double gap_;
  std::map<CallKey, double> measured_;
  std::map<Kind, std::vector<Point>> points_;
};

/// Seconds between two kernels, and for the first and last blocks of one.
inline constexpr double launch_gap = 2e-6;

/// The assumptions in words, a line each.
std::string assumptions(const DeviceModel& gpu);

}  // namespace nrl::machine
