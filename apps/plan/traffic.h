#pragma once
// The communication of a training step, computed from the plan. The collective log of a run must agree.

#include <vector>

#include "apps/plan/run_plan.h"
#include "parallel/comm/collective_log.h"

namespace nrl::plan {

/// The operations of one kind in one group during a step. `bytes` counts as in comm::CollectiveLog.
struct Traffic {
  parallel::GroupId group;  ///< whose communicator is used (parallel::group_aliases())
  int ranks = 1;
  comm::Op op = comm::Op::all_reduce;
  int64_t count = 0, bytes = 0;
  /// Tokens are sent to the experts that the router chooses: bytes are those of a router that sends as many
  /// to every expert.
  bool balanced = false;

  /// Bytes that a rank sends.
  double wire() const { return comm::wire_bytes(op, static_cast<double>(bytes), ranks); }
};

/// What communication is for.
enum class Purpose : uint8_t { layers, messages, gradients, weights, scalars };

/// One kind of operation for one purpose; `group` as the plan asks for it, of several ranks.
struct TrafficPart {
  Purpose purpose;
  Traffic traffic;
};
/// The parts of step_traffic().
std::vector<TrafficPart> traffic_parts(const RunPlan& plan, const parallel::ProcessGrid& grid);

/// What a training step of this rank communicates in its layers (tensor, context and expert parallelism),
/// with other pipeline stages, for its parameter groups (gradients, weights) and for the scalars of the step;
/// groups of one rank are left out.
std::vector<Traffic> step_traffic(const RunPlan& plan, const parallel::ProcessGrid& grid,
                                  std::span<const parallel::GroupId> groups);

}  // namespace nrl::plan
