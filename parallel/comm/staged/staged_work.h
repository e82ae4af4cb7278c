#pragma once
// Private to the staged backend: a group and its operations.

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <utility>

#include "core/base/error.h"
#include "parallel/comm/device_options.h"
#include "parallel/comm/device_work.h"
#include "parallel/comm/host_transport.h"
#include "parallel/comm/staged/staging.h"

namespace nrl::comm {

/// Shared by the operations of a group; lives until the last of them and the communicator are destroyed.
struct StagedGroup {
  StagedGroup(device::Runtime& device, const DeviceCommOptions& options)
      : runtime(device),
        events(std::make_shared<EventPool>(device, device::EventKind::order)),
        ends(std::make_shared<EventPool>(device, device::EventKind::order)),
        staging(device, options.staged_slot_bytes, 2),
        messages(device) {}

  device::Runtime& runtime;
  std::shared_ptr<EventPool> events;
  std::shared_ptr<EventPool> ends;  ///< finish events: may be reused before they have completed
  Staging staging;
  MessageStaging messages;
  std::deque<const Work*> senders;  ///< operations with sends not posted yet, in order
  std::shared_ptr<HostTransport> transport;
  CollectiveLog* log = nullptr;
  int rank = 0, size = 1;
  std::string label;
  std::atomic<bool> canceled{false};  ///< the device may have been destroyed
};

/// An operation of the group.
class StagedWork : public DeviceWork {
 public:
  StagedWork(std::shared_ptr<StagedGroup> group, const LogTicket& ticket,
             std::shared_ptr<std::atomic<int>> unwaited, Call call)
      : DeviceWork(group->log, ticket, &group->transport->executor(), std::move(unwaited), call,
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
  /// Must precede every use of the device: another thread may run the operation, or the group was canceled.
  void attach() const {
    if (group_->canceled) fail(Exit::internal, "{} on {} was canceled", name_of(call_.op), group_->label);
    group_->runtime.bind_thread();
  }

 private:
  std::shared_ptr<StagedGroup> group_;
  Call call_;
};

/// A collective, processed in chunks.
std::shared_ptr<Work> make_staged_collective(std::shared_ptr<StagedGroup> group, const LogTicket& ticket,
                                             std::shared_ptr<std::atomic<int>> unwaited, Call call);
/// One message or an exchange.
std::shared_ptr<Work> make_staged_messages(std::shared_ptr<StagedGroup> group, const LogTicket& ticket,
                                           std::shared_ptr<std::atomic<int>> unwaited, Call call);

}  // namespace nrl::comm
