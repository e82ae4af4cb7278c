#pragma once
// How a run gets its state: from a checkpoint, from a model directory, or from the seed.

#include "apps/train/run.h"

namespace nrl::train {

/// Weights of policy.model_name, else random ones from pretrain.seed. One rank of each node
/// (`verify`) checks the directory's checksums first. Not collective.
void load_initial_weights(const Config& config, engine::Engine& engine, bool verify, int threads,
                          const PhaseNote& phase);

/// Collective. Chooses the checkpoint that the run resumes from, loads it or the initial weights, and puts
/// other checkpoints out of the way. Sets position, resumed_from and changes, and adds to warnings.
void initialize(Run& run, const PhaseNote& phase);

}  // namespace nrl::train
