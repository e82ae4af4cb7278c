#pragma once
// The time of one call of an op on a device, from its cost and the rates of the device's model.

#include <string>

#include "apps/machine/device_models.h"
#include "core/ops/cost.h"

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

/// Seconds between two kernels, and for the first and last blocks of one.
inline constexpr double launch_gap = 2e-6;

/// The assumptions in words, a line each.
std::string assumptions(const DeviceModel& gpu);

}  // namespace nrl::machine
