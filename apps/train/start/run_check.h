#pragma once
// Checks a configuration before the run is set up, reporting all problems at once: against the ranks, the
// model and the input files.

#include <optional>

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
  bool memory = true;                   ///< check_run(): must fit into this machine's memory, if it uses that
};

/// Adds all problems to `result` but those of the memory of this machine. Reads the model's config.json and
/// the data's manifests. Returns the model; unset if it has problems.
std::optional<model::ModelSpec> check_but_memory(ConfigResult& result, const RunSetting& setting);

}  // namespace nrl::train
