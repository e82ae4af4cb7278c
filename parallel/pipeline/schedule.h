#pragma once
// Schedules are data: the order of one rank's work in an optimizer step. A generator makes the list, one
// interpreter executes it (apps/train), and a planner can simulate the same list.

#include <cstdint>
#include <vector>

namespace nrl::pipeline {

enum class ActionKind : uint8_t {
  forward,   ///< microbatch through the chunk; on the last stage with the loss and the head's gradients
  backward,  ///< data and weight gradients, layer by layer
  reduce,    ///< wait until the gradients of all buckets are reduced over data parallel ranks
  step,      ///< clip, update, and bring updated weights to all ranks
};

struct Action {
  ActionKind kind;
  int microbatch = 0;
  int chunk = 0;
  /// The last microbatch of the step: its gradients complete the sums, so buckets are reduced while it runs.
  bool last = false;
};

/// The schedule of a pipeline of one stage: every microbatch's backward follows its forward at once, so that
/// activations of one microbatch exist at a time.
std::vector<Action> single_stage_schedule(int microbatches);

}  // namespace nrl::pipeline
