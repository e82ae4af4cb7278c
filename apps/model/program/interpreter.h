#pragma once
// Executes schedules; used for training, evaluation and dry runs.

#include <functional>
#include <span>

#include "apps/model/program/stage.h"
#include "parallel/pipeline/messages.h"
#include "parallel/pipeline/schedule.h"

namespace nrl::model {

/// The parts of an optimizer step outside the layers. Empty hooks are skipped; a dry run calls none.
struct StepHooks {
  /// Called on the model's last stage when LayerContext::log_prob holds the log-probabilities of
  /// `microbatch`; the next microbatch overwrites them.
  std::function<void(int microbatch)> log_probs_ready = {};
  /// Waits until the gradients are reduced over the data-parallel ranks.
  std::function<void()> finish_reduce = {};
  /// Clips the gradients, updates the weights and gathers them on all ranks.
  std::function<void()> update = {};
};

/// The tensor of a message of the schedule: the actions that send, post and receive it.
Boundary boundary_of(pipeline::ActionKind message);

/// The visits of layers that execute() makes, in order, without ticks.
std::vector<LayerVisit> layer_visits(const pipeline::Schedule& schedule, const Stage& stage);

/// The stage and the ranks that execute a schedule.
struct Execution {
  Stage& stage;
  int program;         ///< added to the stage with the schedule's stashes
  ModelLayout layout;  ///< with several stages neighboring chunks are on other ranks, else on this one
  /// Null: nothing is sent or received, because only uses of buffers are recorded (Stage::record).
  pipeline::StageMessages* messages = nullptr;
  /// False: executions of other microbatches with the same weights came before, without an update.
  bool first = true;
};

/// Executes the actions of a rank, or records them (Stage::record). `batches`: by microbatch; must outlive
/// the call.
void execute(const pipeline::Schedule& schedule, const Execution& on, std::span<const MicroBatch> batches,
             const StepHooks& hooks);

}  // namespace nrl::model
