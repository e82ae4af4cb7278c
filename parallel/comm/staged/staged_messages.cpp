#include <algorithm>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "parallel/comm/staged/staged_work.h"

namespace nrl::comm {

namespace {

/// Sends are posted when their data is in host memory, in issue order; receives are posted immediately.
/// Neither blocks the executor on the device.
class StagedMessages final : public StagedWork {
 public:
  using StagedWork::StagedWork;
  ~StagedMessages() override {
    if (unsent_ > 0) std::erase(group().senders, this);  // dropped in flight
    for (Part& p : parts_)
      if (p.buffer) group().messages.abandon(std::move(p.buffer));
  }

 private:
  struct Part {
    Message message;
    std::unique_ptr<MessageStaging::Buffer> buffer;
    EventPool::Pooled copied;                  ///< of a send: its data is in the buffer
    std::unique_ptr<PendingMessages> pending;  ///< null: not posted yet
  };

  Advance start() override {
    MessageStaging& staging = group().messages;
    begin(staging.copies());
    for (const Message& m : call().messages) {
      Part p{m, staging.take(m.data.bytes()), {}, nullptr};
      p.message.data.data = p.buffer->memory.data();
      p.message.tag += device_tag;
      parts_.push_back(std::move(p));
    }
    for (size_t i = 0; i < parts_.size(); ++i) {
      Part& p = parts_[i];
      if (p.message.kind == Message::Kind::recv) {
        p.pending = transport().post({p.message});
        continue;
      }
      staging.copies().to_host(p.buffer->memory.data(), call().messages[i].data.data, p.message.data.bytes());
      p.copied = group().events->take();
      p.copied->record(staging.copies().out());
      ++unsent_;
    }
    if (unsent_ > 0) group().senders.push_back(this);
    return poll();
  }

  Advance poll() override {
    try {
      attach();
      bool moved = send_copied();
      bool all = true;
      for (size_t i = 0; i < parts_.size(); ++i) {
        Part& p = parts_[i];
        if (!p.buffer) continue;
        if (!p.pending || !p.pending->test()) {
          all = false;
          continue;
        }
        moved = true;
        const bool arrived = p.message.kind == Message::Kind::recv;
        if (arrived)
          group().messages.copies().to_device(call().messages[i].data.data, p.buffer->memory.data(),
                                              p.message.data.bytes());
        group().messages.give(std::move(p.buffer), arrived);
      }
      if (!all) return moved ? Advance::progressed : Advance::waiting;
      finish_in(group().messages.copies().in());
      return Advance::done;
    } catch (...) {
      std::erase(group().senders, this);  // let later senders proceed
      unsent_ = 0;
      throw;
    }
  }

  /// Posts the sends whose data has arrived from the device, if it is this operation's turn.
  bool send_copied() {
    if (unsent_ == 0 || group().senders.front() != this) return false;
    bool moved = false;
    for (Part& p : parts_) {
      if (p.message.kind == Message::Kind::recv || p.pending) continue;
      if (!p.copied->done()) return moved;
      p.pending = transport().post({p.message});
      moved = true;
      --unsent_;
    }
    group().senders.pop_front();
    return moved;
  }

  std::vector<Part> parts_;
  int unsent_ = 0;
};

}  // namespace

std::shared_ptr<Work> make_staged_messages(std::shared_ptr<StagedGroup> group, const LogTicket& ticket,
                                           std::shared_ptr<std::atomic<int>> unwaited, Call call) {
  return std::make_shared<StagedMessages>(std::move(group), ticket, std::move(unwaited), std::move(call));
}

}  // namespace nrl::comm
