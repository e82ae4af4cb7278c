#pragma once
// nrl-train tune batch-size: the largest and the fastest microbatch of a configuration.

#include <optional>
#include <string>
#include <vector>

#include "parallel/comm/world/world.h"

namespace nrl::tune {

struct BatchSizeArgs {
  std::string config;                  ///< a YAML file
  std::vector<std::string> overrides;  ///< "key=value"
  /// Instead of memory.max_memory. On a CPU the share is for the process: the plan, and what host_memory()
  /// counts for steps on random tokens, as `used` shows. A run holds the plan alone against
  /// memory.max_memory.
  std::optional<double> max_memory;
  /// Microbatches to consider; those that do not divide the batch or do not suit the configuration are
  /// skipped. Empty: all that divide the batch, of which the largest are measured.
  std::vector<int64_t> sizes;
  int steps = 3;  ///< timed steps of each size
};

/// Collective. Finds the largest microbatch whose plan fits into the budget on every rank, without running,
/// then trains a few steps on random tokens with that and smaller sizes, all with the same global batch, and
/// prints memory and tokens/s of each and the line of YAML to use. Returns the exit code: 71 if not even one
/// sequence fits.
int tune_batch_size(nrl::comm::World& world, const BatchSizeArgs& args);

}  // namespace nrl::tune
