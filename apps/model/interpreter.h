#pragma once
// The one interpreter of schedules: training, evaluation and dry runs go through it.

#include <functional>
#include <span>

#include "apps/model/stage.h"
#include "parallel/pipeline/schedule.h"

namespace nrl::model {

/// What belongs to a step besides the layers. Empty ones are skipped; a dry run calls none.
struct StepHooks {
  /// The log-probabilities of a microbatch are there (LayerContext::log_prob), until the next one's.
  std::function<void(int microbatch)> scored = {};
  /// Waits until the gradients are reduced over the data-parallel ranks.
  std::function<void()> finish_reduce = {};
  /// Clips, updates, and brings updated weights to all ranks.
  std::function<void()> step = {};
};

/// Executes the actions of one rank that holds all chunks of the model, or records them (Stage::record).
/// `program`: of the stage, with the schedule's stashes; `batches` by microbatch, all alive until the end.
void execute(const pipeline::Schedule& schedule, Stage& stage, int program,
             std::span<const MicroBatch> batches, const StepHooks& hooks);

}  // namespace nrl::model
