#pragma once
// Runs the schedules of all stages against each other without a model: time, bubble, stashes, deadlock.

#include <cstddef>
#include <string>
#include <vector>

#include "parallel/comm/launch_model.h"
#include "parallel/pipeline/schedule.h"

namespace nrl::pipeline {

/// Times of a chunk, in any unit.
struct ChunkCosts {
  double forward = 1, backward_data = 1, backward_weight = 1;
  double message = 0;  ///< transfer time of what the chunk sends, each way
};

/// By chunk of the model; one entry stands for all chunks.
using Costs = std::vector<ChunkCosts>;

/// Costs of microbatches that differ: the first one of a step gathers updated weights, the last one reduces
/// gradients. Of a step with one microbatch, `first` has the forward passes and `last` the backward passes.
struct MicrobatchCosts {
  Costs first, middle, last;
};

struct Simulation {
  struct Completed {
    int stage;
    size_t action;      ///< index into the stage's actions
    double begin, end;  ///< time; begin < end for passes that cost something
  };
  double makespan = 0;                         ///< from the first action to the last one of any stage
  std::vector<double> bubble;                  ///< per stage: share of the makespan without computation
  std::vector<std::vector<int>> peak_stashes;  ///< per stage and pool
  std::vector<Completed> order;                ///< all actions by the time of their completion
  std::string deadlock;                        ///< empty, or the action that every blocked stage waits at
  size_t visits = 0;  ///< work: how often an action was examined or executed, at most 3 times each
};

/// Executes the lists under the weakest communication rules: one FIFO per neighbor and kind (schedule.h), a
/// receive blocks its stage until the message has arrived, and a send completes with its receive. Reduction
/// and step take no time. An action waits for its input, so a list in an illegal order ends in a deadlock.
Simulation simulate(std::span<const Schedule> stages, const Costs& costs);
Simulation simulate(std::span<const Schedule> stages, const MicrobatchCosts& costs);
/// Simulation::makespan alone, in less time. The lists must not end in a deadlock.
double makespan(std::span<const Schedule> stages, const MicrobatchCosts& costs);
/// A lower bound of the makespan of make_schedule()'s lists for training, without them: of every stage its
/// passes, the first microbatch's way to it, and the last one's way back.
double least_makespan(const ScheduleOptions& options, const MicrobatchCosts& costs);

/// The messages of the lists, as kernels of NCCL: these occupy the device until their partner runs, which
/// simulate() does not know. A schedule is for GPUs only if it comes to its end in both models.
comm::LaunchModel message_launches(std::span<const Schedule> stages);

/// Merges the schedules of all stages into one for a rank that holds all chunks: in the simulation's order,
/// chunks by their index in the model. A receive copies from the neighboring chunk; sends and finish_send are
/// dropped, and finish_reduce and step occur once, at the end.
Schedule merge(std::span<const Schedule> stages, const Simulation& simulation);

}  // namespace nrl::pipeline
