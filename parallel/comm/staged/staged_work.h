#pragma once
// Private to the staged backend: a group and its operations.

#include "core/base/error.h"
#include "parallel/comm/device_options.h"
#include "parallel/comm/device_work.h"
#include "parallel/comm/host_transport.h"
#include "parallel/comm/staged/staging.h"

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <utility>

namespace nrl::comm {

/// What the operations of a group need; outlives the communicator as long as one of them.
struct StagedGroup {
  StagedGroup(device::Runtime& device, const DeviceCommOptions& options)
      : runtime(device),
        events(std::make_shared<EventPool>(device, device::EventKind::order)),
        ends(std::make_shared<EventPool>(device, device::EventKind::order)),
        staging(device, options.staged_slot_bytes, 2),
        messages(device) {}

  device::Runtime& runtime;
  std::shared_ptr<EventPool> events;
  std::shared_ptr<EventPool> ends;  ///< recorded only: may be taken again before they are done
  Staging staging;
  MessageStaging messages;
  std::deque<const Work*> senders;  ///< operations with sends that have not all left, in order
  std::shared_ptr<HostTransport> transport;
  Ledger* ledger = nullptr;
  int rank = 0, size = 1;
  std::string label;
  std::atomic<bool> cancelled{false};  ///< the device may be gone
};

/// An operation of the group.
class StagedWork : public DeviceWork {
 public:
  StagedWork(std::shared_ptr<StagedGroup> group, const LedgerTicket& ticket,
             std::shared_ptr<std::atomic<int>> unwaited, Call call)
      : DeviceWork(group->ledger, ticket, &group->transport->executor(), std::move(unwaited), call,
                   *group->events, *group->ends),
        group_(std::move(group)),
        call_(std::move(call)) {
    call_.previous = nullptr;
  }

 protected:
  StagedGroup& group() const { return *group_; }
  HostTransport& transport() const { return *group_->transport; }
  const Call& call() const { return call_; }

  void begin(const CopyStreams& copies) {
    attach();
    order_behind({copies.out(), copies.in()});
  }
  /// Before every use of the device: another thread may carry the operation on, or the group may be gone.
  void attach() const {
    if (group_->cancelled) fail(Exit::internal, "{} on {} was canceled", name_of(call_.op), group_->label);
    group_->runtime.bind_thread();
  }

 private:
  std::shared_ptr<StagedGroup> group_;
  Call call_;
};

/// A collective, a chunk at a time.
std::shared_ptr<Work> make_staged_collective(std::shared_ptr<StagedGroup> group, const LedgerTicket& ticket,
                                             std::shared_ptr<std::atomic<int>> unwaited, Call call);
/// One message or an exchange.
std::shared_ptr<Work> make_staged_messages(std::shared_ptr<StagedGroup> group, const LedgerTicket& ticket,
                                           std::shared_ptr<std::atomic<int>> unwaited, Call call);

}  // namespace nrl::comm
