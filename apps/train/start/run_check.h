#pragma once
// Checks a configuration before the run is set up, reporting all problems at once: against the ranks, the
// model, the input files and the memory.

#include "apps/model/spec/spec.h"
#include "core/config/load.h"

namespace nrl::train {

/// The environment that a configuration is checked against.
struct RunSetting {
  int world = 1;  ///< number of ranks; 0: unknown, checks that depend on it are skipped
  RankCount count = RankCount::started;
  std::vector<ClusterNode> nodes = {};  ///< in the order of the ranks; empty: unknown
  int local = 1;                        ///< ranks that share this machine's memory
  bool grid = true;                     ///< must suit the number of ranks; false: as if it were unknown
  bool training = false;                ///< of a training run: environment variables that it would ignore
  bool files = true;                    ///< data and checkpoints must exist; false for a plan
  bool memory = true;                   ///< the run must fit into its memory; false: as if it were unknown
  size_t gpu_memory = 0;                ///< bytes of a rank's GPU; 0: unknown, as it is before it is open
};

/// Adds all problems to `result`. Reads the model's config.json and the data's manifests; does not allocate
/// the run's memory.
void check_run(ConfigResult& result, const RunSetting& setting);

/// check_run(), for a configuration that is only tried: an error in which the check itself ends, as may the
/// planning of memory, becomes a problem too. Internal errors are thrown.
void check_tried_run(ConfigResult& result, const RunSetting& setting);

/// The last part of check_run(), for a configuration without other problems: takes smaller microbatches in
/// `result`, with a warning, where they may be chosen and the run does not fit, or adds a problem (exit 71).
void fit_memory(ConfigResult& result, const model::ModelSpec& spec, const RunSetting& setting);

}  // namespace nrl::train
