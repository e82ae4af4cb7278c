#pragma once
// Runs the schedules of all stages against each other without a model: time, bubble, stashes, deadlock.

#include "parallel/pipeline/schedule.h"

#include <cstddef>

namespace nrl::pipeline {

/// Times of a chunk, in any unit.
struct ChunkCosts {
  double forward = 1, backward_data = 1, backward_weight = 1;
  double message = 0;  ///< of what the chunk sends, each way
};

/// By chunk of the model; one entry stands for all chunks.
using Costs = std::vector<ChunkCosts>;

struct Simulation {
  struct Completed {
    int stage;
    size_t action;  ///< index into the stage's actions
  };
  double makespan = 0;                         ///< from the first action to the last one of any stage
  std::vector<double> bubble;                  ///< per stage: share of the makespan without computation
  std::vector<std::vector<int>> peak_stashes;  ///< per stage and local chunk
  std::vector<Completed> order;                ///< all actions by the time of their completion
  std::string deadlock;  ///< empty, or where every stage that cannot go on stands and what it waits for
};

/// Executes the lists under the weakest rules of communication: one FIFO per neighbor and kind (schedule.h),
/// a receive blocks its stage until the message has arrived, and a send is complete when its receive is.
/// Reduction and step take no time. An action whose input does not exist waits for it, so a list in an
/// illegal order ends in a deadlock.
Simulation simulate(std::span<const Schedule> stages, const Costs& costs);

/// The schedules of all stages as one rank executes them that holds all chunks: in the simulation's order,
/// chunks by their index in the model. A receive copies from the neighboring chunk; sends and finish_send
/// vanish, and finish_reduce and step stand once, at the end.
Schedule merge(std::span<const Schedule> stages, const Simulation& simulation);

}  // namespace nrl::pipeline
