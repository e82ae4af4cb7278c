#pragma once
// The types of profile.json: what each rank computes from its own window, what is gathered, and what `profile
// show`, `compare` and the page read. Aggregates only: a profile of 1,000 ranks is some 100 KB. All times are
// seconds per step unless said otherwise; bytes and FLOPs are per step, too.

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "memory/plan.h"

namespace nrl::profile {

/// A step's wall time by cause; the parts add up to `wall`. In this order of precedence.
struct Split {
  double wall = 0;
  double compute = 0;       ///< ops: GEMMs, attention, memory-bound
  double update = 0;        ///< ops of the optimizer step
  double recompute = 0;     ///< ops that were computed again
  double late = 0;          ///< blocked in a collective before its last rank arrived
  double wire = 0;          ///< blocked in a collective afterwards
  double bubble = 0;        ///< blocked in a message between stages, as far as the schedule has it
  double imbalance = 0;     ///< the rest of that
  double offload = 0;       ///< waiting for copies of offloaded memory
  double data = 0;          ///< waiting for the loader
  double host = 0;          ///< GPU: idle because the host had not enqueued yet
  double launch = 0;        ///< GPU: other gaps between kernels
  double report = 0;        ///< the program's own output and statistics
  double unattributed = 0;  ///< the rest

  double parts() const {
    return compute + update + recompute + late + wire + bubble + imbalance + offload + data + host + launch +
           report + unattributed;
  }
};

/// The members of Split beside `wall`, with their names in files and tables.
inline constexpr std::array<std::pair<const char*, double Split::*>, 13> split_parts{{
    {"compute", &Split::compute},
    {"update", &Split::update},
    {"recompute", &Split::recompute},
    {"late", &Split::late},
    {"wire", &Split::wire},
    {"bubble", &Split::bubble},
    {"imbalance", &Split::imbalance},
    {"offload", &Split::offload},
    {"data", &Split::data},
    {"host", &Split::host},
    {"launch", &Split::launch},
    {"report", &Split::report},
    {"unattributed", &Split::unattributed},
}};

/// The limit of an operation.
enum class Bound : uint8_t { arithmetic, memory, launch };

/// Calls of one op in one part of the step, together.
struct Operation {
  std::string name;  ///< of the kernel: "linear_forward"
  std::string part;  ///< "layer GEMMs, forward"
  int64_t calls = 0;
  double seconds = 0, shortest = 0, longest = 0;  ///< together; of one call
  double flops = 0, bytes = 0;
  double attainable = 0;  ///< seconds at the peaks of the machine
  double arithmetic = 0;  ///< seconds of its FLOPs at the peak, without its memory
  Bound bound = Bound::memory;
  int64_t written = 0;  ///< bytes

  double lost() const { return seconds - attainable; }
};

/// Operations of communication of one kind in one kind of group.
struct GroupTime {
  std::string group, operation, algorithm;
  int ranks = 1, nodes = 1;
  int64_t calls = 0, bytes = 0;
  double wire_bytes = 0;  ///< that a rank sends
  double busy = 0, exposed = 0, late = 0, wire = 0;
  double latency = 0;  ///< seconds of `wire` of an operation of a few bytes; 0: there was none
  double link = 0;     ///< bytes/s of the best link between its ranks, each way; 0: unknown
};

/// A buffer at the peak of memory. Times are seconds from the begin of the step.
struct Alive {
  std::string name;
  memory::Category category = memory::Category::activations;
  int64_t bytes = 0;
  double from = 0, to = 0;
};

/// The memory of a step: the plan against the clock.
struct MemoryUse {
  int64_t arena = 0, peak = 0, mean = 0;
  double peak_at = 0;  ///< seconds from the begin of the step
  /// Bytes by category from each time on.
  std::vector<std::pair<double, std::array<int64_t, memory::category_count>>> curve;
  std::vector<Alive> at_peak;          ///< largest first
  int64_t buffers = 0, intervals = 0;  ///< intervals: lifetimes of all buffers
  int64_t interval_bytes = 0;          ///< of these together
};

struct RankProfile {
  int rank = 0;
  std::string host, device;
  Split split;
  std::vector<double> step_s;
  std::vector<Operation> operations;
  std::vector<Operation> layers;  ///< all ops of each layer, by its name
  std::vector<GroupTime> groups;
  MemoryUse memory;
  double cpu_seconds = 0;   ///< of all threads
  double starved = 0;       ///< in which the main thread could run but had no processor
  double read_seconds = 0;  ///< of all threads together, reading data
  int64_t involuntary_switches = 0, migrations = 0, resident_bytes = 0;
  int cores = 0;
  int64_t arrived_last = 0;   ///< collectives of the window in which this rank was the last one
  double caused_waiting = 0;  ///< seconds that others waited for it
  double clock_error = 0;
  int64_t dropped = 0;

  /// Seconds of own work: the step without waiting for other ranks.
  double own_work() const { return split.wall - split.late - split.wire - split.bubble - split.imbalance; }
};

enum class Severity : uint8_t { low, medium, high };

/// Something that costs time, with the keys that may mend it.
struct Finding {
  std::string type;  ///< "exposed_gradients", "low_gpu_utilization", ...
  std::string text;  ///< one sentence
  double value = 0;  ///< that the threshold was compared with
  Severity severity = Severity::medium;
  double seconds = 0;                  ///< of the step that it costs at most
  std::vector<std::string> overrides;  ///< "distributed.overlap_grad_reduce=true"; empty: no key mends it
  double predicted_s = 0;              ///< of a step with them; 0: not predicted
  double model_error = 0;              ///< of the prediction, from the present step: 0.03
  bool changes_numbers = false;        ///< they change what is computed
};

/// The run that was profiled.
struct RunFacts {
  std::string version, command, started;  ///< started: ISO 8601
  std::string config;                     ///< resolved, as YAML
  int world = 1, nodes = 1, threads = 1;
  int stages = 1;  ///< of the pipeline; the ranks of a stage are consecutive
  int64_t first_step = 0, last_step = 0;
  int64_t tokens_per_step = 0;
  double flops_per_step = 0;  ///< model FLOPs of all ranks, recomputation excluded
};

struct Profile {
  RunFacts facts;
  std::vector<RankProfile> ranks;     ///< by rank
  Split split;                        ///< of the rank with most own work
  std::vector<Operation> operations;  ///< summed over the ranks, by the time lost
  std::vector<Operation> layers;      ///< in the same way
  std::vector<Finding> findings;      ///< by the time they cost
};

}  // namespace nrl::profile
