#include "parallel/comm/self/self_comm.h"

#include "core/base/error.h"
#include "parallel/comm/executor.h"

#include <cstring>
#include <functional>
#include <map>

namespace nrl::comm {

namespace {

/// copy(from, to, bytes) of what stays with this rank; never called for no bytes or for equal addresses.
using Copier = std::function<void(const void*, void*, int64_t)>;

void copy_host(const void* in, void* out, int64_t bytes) {
  std::memmove(out, in, static_cast<size_t>(bytes));
}

/// Messages to oneself: the k-th send of a tag meets the k-th receive of it.
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

class SelfWork final : public Work {
 public:
  SelfWork(Ledger* ledger, const LedgerTicket& ticket, std::shared_ptr<std::atomic<int>> unwaited, Call call,
           Copier copier)
      : Work(ledger, ticket, nullptr, std::move(unwaited)),
        call_(std::move(call)),
        copier_(std::move(copier)) {}

 private:
  void copy(const void* in, void* out, int64_t bytes) const {
    if (bytes > 0 && in != out) copier_(in, out, bytes);
  }
  bool start() override {
    switch (call_.op) {
      case Op::all_gather:
      case Op::reduce_scatter:
      case Op::all_to_all:
        copy(call_.in, call_.out, call_.count * size_of(call_.dtype));
        break;
      case Op::all_to_all_v:
        copy(call_.in, call_.out, call_.send_counts[0] * size_of(call_.dtype));
        break;
      case Op::exchange:
        deliver(call_.messages, [this](const void* in, void* out, int64_t bytes) { copy(in, out, bytes); });
        break;
      default:
        break;
    }
    return true;
  }
  Call call_;
  Copier copier_;
};

void check_single(const Communicator& c, std::span<const int> ranks) {
  NRL_CHECK(ranks.size() == 1 && ranks[0] == 0, "subgroup of {}: {} ranks", c.label(), ranks.size());
}

class SelfCommunicator final : public Communicator {
 public:
  SelfCommunicator(std::string_view name, int world_rank, Ledger* ledger)
      : Communicator(std::string(name), 0, {world_rank}, ledger) {}

  std::unique_ptr<Communicator> split(int color, int, std::string_view name) override {
    return color < 0 ? nullptr : make_self(name, members()[0], ledger());
  }
  std::unique_ptr<Communicator> subgroup(std::span<const int> ranks, std::string_view name) override {
    if (ranks.empty()) return nullptr;
    check_single(*this, ranks);
    return make_self(name, members()[0], ledger());
  }

 private:
  std::shared_ptr<Work> submit(Call call, bool) override {
    NRL_CHECK(call.stream.native == nullptr, "{} on {}: host memory takes no stream", name_of(call.op),
              label());
    const LedgerTicket ticket = enroll(call);
    auto work = std::make_shared<SelfWork>(ledger(), ticket, unwaited(), std::move(call), copy_host);
    work->run_now();
    return work;
  }
};

class DeviceSelfCommunicator final : public Communicator {
 public:
  DeviceSelfCommunicator(std::unique_ptr<Communicator> own, Communicator& host, device::Runtime& device)
      : Communicator(host.name(), 0, host.members(), host.ledger()),
        own_(std::move(own)),
        host_(host),
        device_(device) {}

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
  std::shared_ptr<Work> submit(Call call, bool) override {
    const LedgerTicket ticket = enroll(call);
    const bool ordered = call.stream.native != nullptr;
    if (!ordered && !stream_.get()) stream_ = device::Stream(device_);
    const device::StreamHandle stream = ordered ? call.stream.native : stream_.get();
    auto work = std::make_shared<SelfWork>(
        ledger(), ticket, unwaited(), std::move(call),
        [this, stream, ordered](const void* from, void* to, int64_t bytes) {
          device_.copy(to, from, static_cast<size_t>(bytes), device::CopyKind::device_to_device, stream);
          if (!ordered) device_.synchronize(stream);
        });
    work->run_now();
    return work;
  }

  std::unique_ptr<Communicator> own_;  // the host communicator where this one owns it
  Communicator& host_;
  device::Runtime& device_;
  device::Stream stream_;  // of operations without one
};

}  // namespace

std::unique_ptr<Communicator> make_self(std::string_view name, int world_rank, Ledger* ledger) {
  return std::make_unique<SelfCommunicator>(name, world_rank, ledger);
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
