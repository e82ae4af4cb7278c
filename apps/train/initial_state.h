#pragma once
// Initializes the state of a run: from a checkpoint, a model directory, or the seed.

#include "apps/train/run.h"

namespace nrl::train {

/// Loads the weights of policy.model_name, else initializes them from pretrain.seed. Not collective.
/// `verify`: check the checksums of the directory first; one rank per node should.
void load_initial_weights(const Config& config, engine::Engine& engine, bool verify, int threads,
                          const PhaseNote& phase);

/// Collective. Chooses the checkpoint to resume from, loads it or the initial weights, and moves other
/// checkpoints aside. Sets position, resumed_from and changes, and appends to warnings.
void initialize(Run& run, const PhaseNote& phase);

}  // namespace nrl::train
