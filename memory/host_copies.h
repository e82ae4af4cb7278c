#pragma once
// Copies between the memory that ops compute on and Tier::host, beside the computation. On a GPU they run on
// two streams of their own, one per direction; events order them and the stream of the ops. On a CPU the
// threads of the ops make them, and the system reads and writes the file behind Tier::host in the meantime:
// what goes to the host is copied when it is started, what comes back when it is finished.
//
// Copies are timed: by events in the streams, which are read when the step is over, so that nothing waits for
// them. Those of a graph are not: its events would be recorded again before they are read.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "memory/plan.h"

namespace nrl::memory {

/// Work between a device and its host, beside the ops.
enum class HostWork : uint8_t {
  to_host,    ///< a copy
  from_host,  ///< a copy back
  update,     ///< the host's processors update offloaded optimizer state
};

/// The name of the trace ranges around such work.
constexpr const char* name_of(HostWork work) {
  return work == HostWork::to_host ? "offload" : work == HostWork::from_host ? "fetch" : "offloaded_update";
}

/// Gets the work of a dry run, in which nothing is copied.
class HostObserver {
 public:
  virtual ~HostObserver() = default;
  /// Work starts, after that with the number `after` if it is not -1. `bytes`: that are copied; of an update
  /// those that it reads and writes. Returns its number.
  virtual int start(HostWork work, int64_t bytes, int after = -1) = 0;
  /// The ops wait for it.
  virtual void wait(int number) = 0;
};

struct HostCopy {
  void* to = nullptr;
  const void* from = nullptr;
  size_t bytes = 0;
};

/// What was copied in a step.
struct HostCopyStatistics {
  struct Direction {
    int64_t bytes = 0;
    double seconds = 0;  ///< between begin and end of copies; 0: they were not timed, in a graph
  };
  Direction to_host, from_host;
  double exposed_seconds = 0;  ///< that ops waited for copies; on a CPU all of the time

  HostCopyStatistics& operator+=(const HostCopyStatistics& o);
  int64_t bytes() const { return to_host.bytes + from_host.bytes; }
  double seconds() const { return to_host.seconds + from_host.seconds; }
  /// The fraction of the time of copies in which ops ran.
  double hidden() const { return seconds() > 0 ? 1 - std::min(exposed_seconds / seconds(), 1.0) : 0; }
};

class HostCopies {
 public:
  HostCopies() = default;
  /// `device`: null on a CPU, which copies with `threads`. `compute`: the stream of the ops. `arenas` have
  /// the memory. The device and the arenas must outlive this object, if anything is copied.
  HostCopies(device::Runtime* device, device::StreamHandle compute, int threads, const Arenas& arenas);

  /// Copies started together.
  using Ticket = int;
  /// Starts copies after all work enqueued for the ops so far.
  Ticket start(std::span<const HostCopy> copies, device::CopyKind kind);
  /// Work enqueued for the ops from now on starts after these copies. Does not block the host.
  void finish(Ticket ticket);

  /// From now on copies are not made: `observer` gets them. Null: ends that.
  void observe(HostObserver* observer) { observer_ = observer; }
  bool observed() const { return observer_ != nullptr; }

  /// Copies since the last call were those of one step. A step that started none is a graph that was captured
  /// before, and copied as much as the last one.
  void end_step();
  /// The copies of the oldest step that ended and was not collected. On a GPU its work must be done. At most
  /// max_steps may wait for that.
  HostCopyStatistics collect();
  static constexpr int64_t max_steps = 4;

 private:
  struct Pending {
    device::Event ready, begin, end, waited;  // all but the first are timed
    std::vector<HostCopy> late;               // CPU: to make in finish()
    bool to_host = false, captured = false, used = false;
  };
  struct Step {
    HostCopyStatistics copied;
    std::vector<Ticket> timed;  // GPU: their times are read when the step is collected
  };
  Ticket unused();
  Step& current() { return steps_[ended_ % max_steps]; }
  void copy(std::span<const HostCopy> copies, device::CopyKind kind);

  HostObserver* observer_ = nullptr;
  device::Runtime* device_ = nullptr;
  const Arenas* arenas_ = nullptr;
  device::StreamHandle compute_ = nullptr;
  int threads_ = 1;
  device::Stream to_host_, from_host_;
  std::vector<Pending> pending_;
  std::vector<Ticket> unused_;
  std::array<Step, max_steps> steps_;
  HostCopyStatistics last_;  // of the step that ended last
  int64_t ended_ = 0, collected_ = 0;
};

}  // namespace nrl::memory
