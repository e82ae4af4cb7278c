#pragma once
// One rank of a layout alone on this machine's device: its step with true sizes and no other rank, every call
// timed in its place.

#include <optional>
#include <vector>

#include "apps/bench/sensor.h"
#include "apps/machine/profile.h"
#include "core/config/load.h"
#include "parallel/comm/world/world.h"

namespace nrl::bench {

struct SoloTimes {
  std::vector<machine::MeasuredCall> calls;  ///< by key, ascending
  double step = 0;                           ///< seconds; median of the rounds
  double in_calls = 0;                       ///< of these
  double gap = 0;                            ///< seconds between two calls; median
  int64_t calls_of_step = 0;
  /// Relative standard deviation of the step over the ranks that measure at once; unset: there is one.
  std::optional<double> spread;
  std::vector<Reading> readings;  ///< one after each round
};

/// Runs `rank` of `ranks` of the configuration, which must have passed check_but_memory() for them, for
/// `rounds` timed steps after two more, on groups that are mute (comm::make_mute()). Fails with
/// Exit::internal if the calls of a step are not the same as in its dry run. All ranks of `world` must call
/// it: they measure at once, as they work, each on its own. `sensor`: of the device.
SoloTimes measure_solo(comm::World& world, const ConfigResult& config, int ranks, int rank, int rounds,
                       const Sensor& sensor);

}  // namespace nrl::bench
