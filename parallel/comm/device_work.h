#pragma once
// Private to the device backends: operations that the executor runs and that events order on the device.

#include <initializer_list>
#include <memory>
#include <utility>

#include "core/device/runtime.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/event_pool.h"
#include "parallel/comm/executor.h"

namespace nrl::comm {

/// An operation between two events: after the caller's stream and the operation it depends on, before work
/// that the caller enqueues after wait().
class DeviceWork : public Work {
 public:
  /// Records the state of call.stream, which must not be captured.
  DeviceWork(CollectiveLog* log, const LogTicket& ticket, Executor* executor,
             std::shared_ptr<std::atomic<int>> unwaited, const Call& call, EventPool& ready,
             EventPool& finished)
      : Work(log, ticket, executor, std::move(unwaited)),
        stream_(call.stream.native),
        previous_(call.previous),
        finished_(finished.take()) {
    if (!stream_) return;
    ready_ = ready.take();
    ready_->record(stream_);
  }

  bool finished() const override { return completed() && (failed() || finished_->done()); }
  void order_stream(void* stream) const override {
    if (!failed()) finished_->wait_in(stream);
  }

 protected:
  /// Makes the streams wait for everything that this operation depends on. Call once.
  void order_behind(std::initializer_list<device::StreamHandle> streams) {
    for (const device::StreamHandle stream : streams) {
      if (ready_) ready_->wait_in(stream);
      if (previous_) previous_->order_stream(stream);
    }
    previous_ = nullptr;  // long chains must not keep their first operation
  }
  /// The result is available when `stream` reaches this point.
  void finish_in(device::StreamHandle stream) { finished_->record(stream); }

 private:
  void block() override {
    Work::block();
    if (failed()) return;
    if (stream_)
      finished_->wait_in(stream_);
    else
      finished_->synchronize();
  }

  device::StreamHandle stream_;
  std::shared_ptr<Work> previous_;
  EventPool::Pooled ready_, finished_;
};

}  // namespace nrl::comm
