#pragma once
// Offline runs for Weights & Biases.

#include <memory>
#include <string>

#include "apps/monitor/sink.h"
#include "core/config/config.h"

namespace nrl::monitor {

/// Writes an offline run, which `wandb sync` uploads, to offline-run-<time>-<id> in `directory`, which is
/// created if missing. A session of a run that exists has a directory of its own with the same id and
/// continues it at its first step; superseded rows are removed from files that were not uploaded yet. Format:
/// wandb/proto/wandb_internal.proto (0.31), in a log of LevelDB. A file without an exit record counts as a
/// run that failed.
std::unique_ptr<Sink> wandb_sink(const std::string& directory, const WandbConfig& config, const RunInfo& run);

}  // namespace nrl::monitor
