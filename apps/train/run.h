#pragma once
// A training run on one rank with everything it works on.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/engine/engine.h"
#include "apps/train/checkpoint_saver.h"
#include "apps/train/placement.h"
#include "apps/train/run_data.h"

namespace nrl::train {

/// Told what a start-up is doing, for people who wait.
using PhaseNote = std::function<void(std::string)>;

struct Run {
  Run(comm::World& world, const ConfigResult& result)
      : world(world), config_result(result), config(config_result.config), placement(world, config_result) {}
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  comm::World& world;
  const ConfigResult config_result;
  const Config& config;
  Placement placement;  // outlives everything that uses its device and groups
  std::unique_ptr<engine::Engine> engine;
  TrainData train;
  std::optional<ValidationData> validation;  ///< of a run that evaluates
  RunRecord record;
  std::unique_ptr<CheckpointSaver> saver;
  Position position;
  std::string resumed_from;           ///< the checkpoint; empty: started from initial weights
  std::vector<std::string> changes;   ///< since the run that saved the checkpoint, one line each
  std::vector<std::string> warnings;  ///< of the start-up
  int kernels = 0;                    ///< that the model and recipe need
  std::string attention;              ///< which library computes it, and why; empty on a CPU
  double peak = 0;                    ///< FLOP/s of matmuls, the denominator of MFU; 0: unknown

  const plan::RunPlan& plan() const { return engine->plan(); }
  int64_t max_steps() const { return train.max_steps; }
};

}  // namespace nrl::train
