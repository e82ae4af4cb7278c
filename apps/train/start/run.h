#pragma once
// All state of a training run on one rank.

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apps/engine/engine.h"
#include "apps/state/checkpoint_saver.h"
#include "apps/train/start/placement.h"
#include "apps/train/start/run_data.h"

namespace nrl::train {

struct Run {
  Run(comm::World& world, const ConfigResult& result)
      : world(world),
        config_result(result),
        repeatable(result),
        config(config_result.config),
        placement(world, config_result) {}
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  comm::World& world;
  const ConfigResult config_result;
  ConfigResult repeatable;  ///< with the microbatch that the run took, if that is not the configured one
  const Config& config;
  Placement placement;  // must outlive everything that uses its device and groups
  std::unique_ptr<engine::Engine> engine;
  TrainData train;
  std::optional<ValidationData> validation;  ///< unset if the run does not evaluate
  RunRecord record;
  std::unique_ptr<CheckpointSaver> saver;
  Position position;
  std::string resumed_from;           ///< the checkpoint; empty: started from initial weights
  std::vector<std::string> changes;   ///< differences to the run that saved the checkpoint, one line each
  std::vector<std::string> warnings;  ///< from start-up
  std::string saves;                  ///< why checkpoints are not saved beside the steps, if auto decided so
  int kernels = 0;                    ///< number of kernels that the model and recipe need
  /// Ops for which a GPU has several implementations, and what runs each pass; empty on a CPU.
  std::vector<std::pair<std::string, std::string>> library_choices;
  double peak = 0;  ///< peak FLOP/s, the denominator of MFU; 0: unknown

  const plan::RunPlan& plan() const { return engine->plan(); }
  int64_t max_steps() const { return train.max_steps; }
};

}  // namespace nrl::train
