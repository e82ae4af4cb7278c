#pragma once
// What a communicator of device memory uses of the one for host memory beneath it.

#include "parallel/comm/communicator.h"
#include "parallel/comm/executor.h"

#include <memory>
#include <vector>

namespace nrl::comm {

/// Messages in flight.
class PendingMessages {
 public:
  virtual ~PendingMessages() = default;
  /// True when all have arrived; not to be called again then. Throws when one failed or was of another size.
  virtual bool test() = 0;
};

/// Tags of messages of device memory start here, so that they do not meet those of the host group.
inline constexpr int kDeviceTag = kMaxTag + 1;

/// The host side of a group. execute() and post() are called from within operations that the executor carries
/// out (Work::start and Work::poll) and are not logged.
class HostTransport {
 public:
  virtual ~HostTransport() = default;
  /// Carries out the operations of all groups of the process.
  virtual Executor& executor() = 0;
  /// Of the group's collectives, those on device memory included.
  virtual Lane& lane() = 0;
  /// Carries out a checked collective on host memory. `call` must outlive the task. all_to_all_v goes pair by
  /// pair: ranks that have nothing for each other need not call it equally often.
  virtual Task execute(const Call& call) = 0;
  /// What peers ring for a collective that waits; null while it must be polled.
  virtual Bell* bell() = 0;
  /// Starts messages; `messages` need not outlive the call, their data must.
  virtual std::unique_ptr<PendingMessages> post(std::vector<Message> messages) = 0;
  /// True when the run has failed and nothing collective may be done any more.
  virtual bool dropped() const = 0;
};

}  // namespace nrl::comm
