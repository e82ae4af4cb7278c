#pragma once
// Waits for the steps of a device, but not forever: a lost peer leaves a collective of a replayed graph
// running, which no watchdog sees.

#include <cstdint>
#include <deque>

#include "core/base/error.h"
#include "core/base/step_times.h"
#include "core/device/runtime.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/device_options.h"

namespace nrl::engine {

struct StepLimits {
  double medians = 20;  ///< a step may take this many times the median step, and at least:
  double graph_seconds = 60;
  double graph_group_seconds = 300;  ///< with several ranks, because one may wait for its data
  /// Without a graph, and for a step after a pause (the first one, or after an evaluation or a checkpoint),
  /// in which ranks may be late: longer than one operation may take, whose watchdog names it.
  double seconds = comm::DeviceCommOptions().nccl_timeout_seconds + 60;
  double alone_seconds = 120;  ///< the same of one rank, which has no peers to be late
};

/// A step did not finish in time. The device does not respond: releasing its memory may block, so the process
/// should end without unwinding.
class StepStuck : public Error {
 public:
  using Error::Error;
};

class StepWatch {
 public:
  explicit StepWatch(const StepLimits& limits = {}) : limits_(limits) {}

  /// Call before the work of a step is enqueued. `graph`: it is replayed, or will be.
  void begin(int64_t step, bool graph);
  /// Waits for `done`, the end of the oldest step that began, in a loop that polls `group` for asynchronous
  /// errors too. Fails with StepStuck, naming rank and step.
  void wait(const device::Event& done, comm::Communicator& group);

 private:
  struct Step {
    int64_t number;
    bool graph;
    bool after_pause;
  };
  double limit(const Step& step, bool alone) const;

  StepLimits limits_;
  std::deque<Step> in_flight_;
  StepTimes times_;  // of steps that follow another one
  int64_t last_end_ns_ = 0;
};

}  // namespace nrl::engine
