#pragma once
// The record of one rank of a window of steps: the input of the analyses of this directory and of the trace
// writers. Nothing in it is computed yet. The analyses are pure functions of it, so that tests can make one.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "apps/plan/parts.h"
#include "core/ops/cost.h"
#include "core/trace/recording.h"
#include "memory/plan.h"
#include "parallel/comm/collective_log.h"

namespace nrl::profile {

/// A group of ranks of the log of communication, by LogEntry::group.
struct GroupOfRanks {
  std::string name;   ///< "dp"
  std::string label;  ///< "dp[0,2]"
  int ranks = 1, nodes = 1;
  std::vector<int> members = {};  ///< ranks of the world, by their rank in the group; empty: unknown
};

using Peaks = plan::Peaks;

/// Counters of the operating system for this process, over the window.
struct HostCounters {
  double cpu_seconds = 0;  ///< of all threads
  double starved = 0;      ///< seconds in which the main thread could run but had no processor
  int64_t involuntary_switches = 0, migrations = 0;
  int64_t resident_bytes = 0;  ///< at the end
  int cores = 0;               ///< that its threads may use
};

struct Recorded {
  int rank = 0;
  std::string host, device;  ///< "cpu", "H100"
  int64_t first_step = 0, last_step = 0;
  std::vector<int64_t> step_begins;  ///< nanoseconds; one more than steps: the last one is the end
  trace::Window window;
  bool on_device = false;        ///< the compute row is `compute_row`, a stream; else the main thread
  uint16_t compute_row = 0;      ///< index for Window::rows
  std::vector<ops::Cost> costs;  ///< by Event::call
  std::vector<comm::LogEntry>
      messages;                      ///< collectives and messages that ended in the window, by their start
  std::vector<GroupOfRanks> groups;  ///< by LogEntry::group
  /// When the last rank arrived in collective i of `messages` (its largest enqueued_ns over the group, on
  /// this rank's clock); of a message, when the later one of its two ends was issued. 0: unknown.
  std::vector<int64_t> last_arrival;
  /// Nanoseconds that the ranks of its group together waited for the last one, by index for `messages`;
  /// empty: unknown.
  std::vector<int64_t> waited;
  /// Buffers of the plan with lifetimes, in ticks; the time of a tick is the begin of its first event.
  std::vector<memory::MemoryPlan::Buffer> buffers;
  int64_t arena_bytes = 0;
  double bubble_fraction = 0;  ///< of the step, of this schedule with equal costs (pipeline::simulate)
  Peaks peaks;
  HostCounters counters;
  double clock_error = 0;  ///< seconds by which the clocks of ranks may differ
};

}  // namespace nrl::profile
