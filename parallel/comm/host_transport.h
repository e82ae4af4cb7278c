#pragma once
// Interface of a host communicator to the device communicator built on it.

#include <memory>
#include <vector>

#include "parallel/comm/communicator.h"
#include "parallel/comm/executor.h"

namespace nrl::comm {

/// Messages in flight.
class PendingMessages {
 public:
  virtual ~PendingMessages() = default;
  /// True when all have arrived; must not be called again after that. Throws when a message
  /// failed or had another size.
  virtual bool test() = 0;
};

/// First tag of messages of device memory, above those of the host group.
inline constexpr int device_tag = max_tag + 1;

/// The host side of a group. execute() and post() must be called from operations run by the executor
/// (Work::start and Work::poll) and are not logged.
class HostTransport {
 public:
  virtual ~HostTransport() = default;
  /// Runs the operations of all groups of the process.
  virtual Executor& executor() = 0;
  /// Lane of the group's collectives, on device memory as well.
  virtual Lane& lane() = 0;
  /// Runs a checked collective on host memory. `call` must outlive the task. all_to_all_v is pairwise: ranks
  /// that exchange nothing need not call it equally often.
  virtual Task execute(const Call& call) = 0;
  /// What carries a collective or message: "shared memory", "messages" or "shared memory and
  /// messages". May be called from any thread.
  virtual std::string_view algorithm(const Call& call) const = 0;
  /// Rung by peers when a blocked collective may proceed; null while it must be polled.
  virtual Doorbell* doorbell() = 0;
  /// Starts messages; `messages` need not outlive the call, their data must.
  virtual std::unique_ptr<PendingMessages> post(std::vector<Message> messages) = 0;
  /// True when the run has failed: no collective may be issued any more.
  virtual bool dropped() const = 0;
};

}  // namespace nrl::comm
