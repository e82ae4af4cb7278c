#include "parallel/comm/self/self_comm.h"

#include <cstring>
#include <exception>
#include <map>

#include "core/base/error.h"
#include "parallel/comm/device_work.h"
#include "parallel/comm/executor.h"

namespace nrl::comm {

namespace {

/// Messages to oneself: the k-th send of a tag matches its k-th receive.
template <class Copy>
void deliver(const std::vector<Message>& messages, const Copy& copy) {
  std::map<int, std::vector<const Message*>> sends;
  std::map<int, size_t> taken;
  for (const Message& m : messages)
    if (m.kind == Message::Kind::send) sends[m.tag].push_back(&m);
  for (const Message& m : messages) {
    if (m.kind == Message::Kind::send) continue;
    const std::vector<const Message*>& of_tag = sends[m.tag];
    const size_t at = taken[m.tag]++;
    NRL_CHECK(at < of_tag.size(), "exchange with oneself: nothing is sent with tag {}", m.tag);
    const Message& from = *of_tag[at];
    NRL_CHECK(from.data.bytes() == m.data.bytes(), "exchange with oneself: {} bytes sent, {} expected",
              from.data.bytes(), m.data.bytes());
    copy(from.data.data, m.data.data, m.data.bytes());
  }
}

/// Executes a call of a group of one rank. copy(from, to, bytes) is never called for 0 bytes or
/// equal addresses.
template <class Copy>
void execute(const Call& call, const Copy& copy_some) {
  const auto copy = [&](const void* in, void* out, int64_t bytes) {
    if (bytes > 0 && in != out) copy_some(in, out, bytes);
  };
  for (const Call::Buffers& b : call.more) copy(b.in, b.out, b.count * size_of(call.dtype));
  switch (call.op) {
    case Op::all_gather:
    case Op::reduce_scatter:
    case Op::all_to_all:
      return copy(call.in, call.out, call.count * size_of(call.dtype));
    case Op::all_to_all_v:
      return copy(call.in, call.out, call.send_counts[0] * size_of(call.dtype));
    case Op::exchange:
      return deliver(call.messages, copy);
    default:
      return;
  }
}

/// Runs `work` immediately, or in the executor of the operation that it depends on.
template <class W>
std::shared_ptr<Work> run_after(std::shared_ptr<Work> previous, std::shared_ptr<W> work, bool blocking) {
  if (Executor* executor = work->executor()) {
    executor->submit(work, {nullptr, std::move(previous)}, blocking);
  } else {
    if (previous && previous->error()) std::rethrow_exception(previous->error());
    work->run_now();
  }
  return work;
}

Executor* executor_of(const std::shared_ptr<Work>& previous) {
  return previous ? previous->executor() : nullptr;
}

class SelfWork final : public Work {
 public:
  SelfWork(CollectiveLog* log, const LogTicket& ticket, std::shared_ptr<std::atomic<int>> unwaited,
           const Call& call)
      : Work(log, ticket, executor_of(call.previous), std::move(unwaited)), call_(call) {
    call_.previous = nullptr;
  }

 private:
  Advance start() override {
    execute(call_, [](const void* in, void* out, int64_t bytes) {
      std::memmove(out, in, static_cast<size_t>(bytes));
    });
    return Advance::done;
  }
  Call call_;
};

/// Runs in the caller's stream, or after it in the communicator's stream when it depends on an operation that
/// an executor runs.
class DeviceSelfWork final : public DeviceWork {
 public:
  DeviceSelfWork(CollectiveLog* log, const LogTicket& ticket, std::shared_ptr<std::atomic<int>> unwaited,
                 const Call& call, device::Runtime& device, EventPool& events,
                 device::StreamHandle own_stream)
      : DeviceWork(log, ticket, executor_of(call.previous), std::move(unwaited), call, events, events),
        device_(device),
        stream_(call.stream.native && !executor() ? call.stream.native : own_stream),
        call_(call) {
    call_.previous = nullptr;
  }

 private:
  Advance start() override {
    if (executor()) device_.bind_thread();
    order_behind({stream_});
    execute(call_, [this](const void* in, void* out, int64_t bytes) {
      device_.copy(out, in, static_cast<size_t>(bytes), device::CopyKind::device_to_device, stream_);
    });
    finish_in(stream_);
    return Advance::done;
  }
  device::Runtime& device_;
  device::StreamHandle stream_;
  Call call_;
};

void check_single(const Communicator& c, std::span<const int> ranks) {
  NRL_CHECK(ranks.size() == 1 && ranks[0] == 0, "subgroup of {}: {} ranks", c.label(), ranks.size());
}

class SelfCommunicator final : public Communicator {
 public:
  SelfCommunicator(std::string_view name, int world_rank, CollectiveLog* log)
      : Communicator(std::string(name), 0, {world_rank}, log) {}

  std::unique_ptr<Communicator> split(int color, int, std::string_view name) override {
    return color < 0 ? nullptr : make_self(name, members()[0], collective_log());
  }
  std::unique_ptr<Communicator> subgroup(std::span<const int> ranks, std::string_view name) override {
    if (ranks.empty()) return nullptr;
    check_single(*this, ranks);
    return make_self(name, members()[0], collective_log());
  }

 private:
  std::shared_ptr<Work> submit(Call call, bool blocking) override {
    NRL_CHECK(call.stream.native == nullptr, "{} on {}: host memory takes no stream", name_of(call.op),
              label());
    auto work = std::make_shared<SelfWork>(collective_log(), log_call(call), unwaited(), call);
    return run_after(std::move(call.previous), std::move(work), blocking);
  }
};

class DeviceSelfCommunicator final : public Communicator {
 public:
  DeviceSelfCommunicator(std::unique_ptr<Communicator> own, Communicator& host, device::Runtime& device)
      : Communicator(host.name(), 0, host.members(), host.collective_log()),
        own_(std::move(own)),
        host_(host),
        device_(device),
        stream_(device),
        events_(std::make_shared<EventPool>(device, device::EventKind::order)) {}

  ~DeviceSelfCommunicator() override {
    if (executor_ && std::uncaught_exceptions() == 0) executor_->release_finished(1e9);
  }

  std::unique_ptr<Communicator> split(int color, int key, std::string_view name) override {
    return color < 0 ? nullptr : make_device_self(host_.split(color, key, name), device_);
  }
  std::unique_ptr<Communicator> subgroup(std::span<const int> ranks, std::string_view name) override {
    if (ranks.empty()) return nullptr;
    check_single(*this, ranks);
    return make_device_self(host_.subgroup(ranks, name), device_);
  }
  Communicator& host() override { return host_; }

 private:
  std::shared_ptr<Work> submit(Call call, bool blocking) override {
    if (Executor* executor = executor_of(call.previous)) executor_ = executor;
    auto work = std::make_shared<DeviceSelfWork>(collective_log(), log_call(call), unwaited(), call, device_,
                                                 *events_, stream_.get());
    return run_after(std::move(call.previous), std::move(work), blocking);
  }

  std::unique_ptr<Communicator> own_;  // host_, if owned
  Communicator& host_;
  device::Runtime& device_;
  device::Stream stream_;  // for operations that cannot use the caller's
  std::shared_ptr<EventPool> events_;
  Executor* executor_ = nullptr;  // of the latest operation that one ran
};

}  // namespace

std::unique_ptr<Communicator> make_self(std::string_view name, int world_rank, CollectiveLog* log) {
  return std::make_unique<SelfCommunicator>(name, world_rank, log);
}

std::unique_ptr<Communicator> make_device_self(Communicator& host, device::Runtime& device) {
  NRL_CHECK(host.size() == 1, "{} has more than one rank", host.label());
  return std::make_unique<DeviceSelfCommunicator>(nullptr, host, device);
}

std::unique_ptr<Communicator> make_device_self(std::unique_ptr<Communicator> host, device::Runtime& device) {
  NRL_CHECK(host->size() == 1, "{} has more than one rank", host->label());
  Communicator& beneath = *host;
  return std::make_unique<DeviceSelfCommunicator>(std::move(host), beneath, device);
}

}  // namespace nrl::comm
