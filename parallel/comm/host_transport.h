#pragma once
// What a communicator of device memory uses of the one for host memory beneath it.

#include "parallel/comm/communicator.h"
#include "parallel/comm/executor.h"

#include <memory>
#include <vector>

namespace nrl::comm {

/// Messages under way.
class PendingMessages {
 public:
  virtual ~PendingMessages() = default;
  /// True when all have arrived; not to be called again then. Throws when one failed or was of another size.
  virtual bool test() = 0;
};

/// The host side of a group. Everything but executor() and dropped() is called from within operations that
/// the executor carries out (Work::start and Work::poll) and is not written into the ledger.
class HostTransport {
 public:
  virtual ~HostTransport() = default;
  /// Carries out the operations of all groups of the process; what is submitted here keeps the order rule.
  virtual Executor& executor() = 0;
  /// Carries a checked collective on host memory out. all_to_all_v goes pair by pair: ranks that have nothing
  /// for each other need not call it equally often.
  virtual void execute(const Call& call) = 0;
  /// Starts messages; `messages` need not outlive the call, their data must.
  virtual std::unique_ptr<PendingMessages> post(std::vector<Message> messages) = 0;
  /// The pause of a thread that polls in an operation.
  virtual Backoff backoff() const = 0;
  /// True when the run has failed and nothing collective may be done any more.
  virtual bool dropped() const = 0;
};

}  // namespace nrl::comm
