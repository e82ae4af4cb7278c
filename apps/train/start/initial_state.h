#pragma once
// Initializes the state of a run: from a checkpoint, a model directory, or the seed.

#include <functional>

#include "apps/monitor/start_phases.h"
#include "apps/state/resume.h"
#include "apps/train/start/run.h"

namespace nrl::train {

/// Work of the start-up that does not use the state, such as selecting the kernels. On a GPU another thread
/// makes the state at the same time; on a CPU this work comes first.
using WorkBeside = std::function<void()>;

/// Loads the weights of policy.model_name, else initializes them from pretrain.seed; adapters come from
/// policy.lora.adapter, else from the seed. Not collective.
/// `verify`: this rank's share of checking the directory's checksums first.
void load_initial_weights(
    const Config& config, engine::Engine& engine, VerifyShare verify, int threads,
    monitor::StartPhases& phases, const WorkBeside& beside = [] {});

/// Before load_checkpoint() of a run that trains adapters, whose checkpoints hold these alone: loads the
/// weights of their base model, else initializes them from the seed.
void load_base_of_adapters(const Config& config, const plan::RunPlan& plan, int threads,
                           const TrainState& state);

/// Collective, in a run without steps in flight: loads a checkpoint of this run, after `adjust` has changed
/// its position, and moves newer ones aside. Fails (65) on all ranks if it is damaged.
void roll_back(Run& run, const std::string& path, const std::function<void(Position&)>& adjust);

/// Collective. Chooses the checkpoint to resume from, loads it or the initial weights, and moves other
/// checkpoints aside. Sets position, resumed_from and changes, and appends to warnings. `beside` must not
/// communicate.
void initialize(Run& run, monitor::StartPhases& phases, const WorkBeside& beside);

}  // namespace nrl::train
