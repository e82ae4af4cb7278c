#pragma once
// A predicted step as trace events, which chrome://tracing and Perfetto show beside a recorded run.
// A process per pipeline stage, named after its first rank; threads: the passes, their calls ("compute"), the
// operations on the links within the node and on the adapters, what the rank waits for, and the messages to
// other stages. Calls and operations have the names of the recorded ones, memory the counters.

#include <cstddef>
#include <span>
#include <string>

#include "apps/plan/run_plan.h"
#include "apps/predict/step_timeline.h"

namespace nrl::planner {

/// Larger traces are slow in a browser.
inline constexpr size_t most_trace_events = 200'000;

/// Writes the trace atomically. The first and the last 2p microbatches of p stages are in full, the passes
/// between them one event with their number. A trace of more than `most` events has calls of the stages that
/// were dry-run alone, then of none, then fewer microbatches. `plans`: of the stages that were not dry-run,
/// by stage; those without one have no memory. Returns the number of events. Fails with Exit::cannot_create
/// or Exit::io.
size_t write_step_trace(const std::string& path, const predict::DryStages& stages,
                        std::span<const plan::RunPlan* const> plans = {}, size_t most = most_trace_events);

}  // namespace nrl::planner
