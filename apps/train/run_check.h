#pragma once
// Everything that can be wrong with a run and be known before it is set up, in one go: the configuration
// against the ranks, the model's shape, files that are missing, memory.

#include "core/config/load.h"

namespace nrl::train {

/// What a configuration is checked against.
struct RunSetting {
  int world = 1;       ///< ranks; 0: not known, nothing that depends on them is checked
  int nodes = 0;       ///< 0: not known
  int local = 1;       ///< ranks that share this machine's memory
  bool files = true;   ///< data and checkpoints must be there; false for a plan
  bool memory = true;  ///< the run must fit into this machine; false for a plan
};

/// Adds all problems to `result`. Reads the model's config.json and the manifests of the data; allocates
/// nothing of the run.
void check_run(ConfigResult& result, const RunSetting& setting);

}  // namespace nrl::train
