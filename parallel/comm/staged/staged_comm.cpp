#include "parallel/comm/staged/staged_comm.h"

#include "core/base/error.h"
#include "parallel/comm/device_work.h"
#include "parallel/comm/host_transport.h"
#include "parallel/comm/self/self_comm.h"
#include "parallel/comm/staged/staging.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <exception>
#include <utility>

namespace nrl::comm {

namespace {

class StagedMessages;

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
  std::deque<StagedMessages*> senders;  ///< operations with sends that have not all left, in order
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

class StagedCollective final : public StagedWork {
 public:
  using StagedWork::StagedWork;

 private:
  Staging& staging() const { return group().staging; }

  Advance start() override {
    begin(staging().copies());
    task_ = carry_out();
    return advance_task();
  }
  Advance poll() override {
    attach();
    return advance_task();
  }
  Bell* bell() override { return transport().bell(); }

  Advance advance_task() {
    try {
      const Advance result = task_.resume();
      if (result == Advance::done) finish_in(staging().copies().in());
      return result;
    } catch (...) {
      staging().copies().settle();
      throw;
    }
  }

  /// `whole` elements of every block in chunks of at most `most`: f(first element, elements) for each.
  template <class Out, class Exchange, class In>
  Task by_chunks(int64_t whole, int64_t most, Out out, Exchange exchange, In in) {
    const auto size = [=](int64_t k) { return std::min(most, whole - k * most); };
    return staging().pipeline((whole + most - 1) / most,
                              [=](int64_t k, std::byte* m) { out(k * most, size(k), m); },
                              [=](int64_t k, std::byte* m) { return exchange(size(k), m); },
                              [=](int64_t k, std::byte* m) { in(k * most, size(k), m); });
  }

  /// The call on host memory for a chunk.
  Task on_host(const std::byte* in, std::byte* out, int64_t count) {
    Call c;
    c.op = call().op;
    c.reduce = call().reduce;
    c.dtype = call().dtype;
    c.in = in;
    c.out = out;
    c.count = count;
    c.peer = call().peer;
    co_await transport().execute(c);
  }

  Task carry_out() {
    const Call& c = call();
    const int n = group().size, me = group().rank;
    const int64_t width = size_of(c.dtype), slot = staging().slot_bytes() / width, count = c.count;
    const auto* in = static_cast<const std::byte*>(c.in);
    auto* out = static_cast<std::byte*>(c.out);
    const CopyStreams& s = staging().copies();
    switch (c.op) {
      case Op::all_reduce:
        co_await by_chunks(
            count, slot,
            [&](int64_t at, int64_t m, std::byte* host) { s.to_host(host, in + at * width, m * width); },
            [&](int64_t m, std::byte* host) { return on_host(host, host, m); },
            [&](int64_t at, int64_t m, std::byte* host) { s.to_device(out + at * width, host, m * width); });
        break;
      case Op::broadcast:
        co_await by_chunks(
            count, slot,
            [&](int64_t at, int64_t m, std::byte* host) {
              if (me == c.peer) s.to_host(host, in + at * width, m * width);
            },
            [&](int64_t m, std::byte* host) { return on_host(host, host, m); },
            [&](int64_t at, int64_t m, std::byte* host) {
              if (me != c.peer) s.to_device(out + at * width, host, m * width);
            });
        break;
      case Op::all_gather:
        co_await by_chunks(
            count, slot / n,
            [&](int64_t at, int64_t m, std::byte* host) {
              s.to_host(host + me * m * width, in + at * width, m * width);
            },
            [&](int64_t m, std::byte* host) { return on_host(host + me * m * width, host, m); },
            [&](int64_t at, int64_t m, std::byte* host) {
              for (int r = 0; r < n; ++r) {
                std::byte* to = out + (r * count + at) * width;
                if (to != in + at * width) s.to_device(to, host + r * m * width, m * width);
              }
            });
        break;
      case Op::reduce_scatter:
        co_await by_chunks(
            count, slot / n,
            [&](int64_t at, int64_t m, std::byte* host) {
              for (int r = 0; r < n; ++r)
                s.to_host(host + r * m * width, in + (r * count + at) * width, m * width);
            },
            [&](int64_t m, std::byte* host) { return on_host(host, host + me * m * width, m); },
            [&](int64_t at, int64_t m, std::byte* host) {
              s.to_device(out + at * width, host + me * m * width, m * width);
            });
        break;
      case Op::all_to_all:
        co_await by_chunks(
            count, slot / 2 / n,
            [&](int64_t at, int64_t m, std::byte* host) {
              for (int r = 0; r < n; ++r)
                s.to_host(host + r * m * width, in + (r * count + at) * width, m * width);
            },
            [&](int64_t m, std::byte* host) { return on_host(host, host + n * m * width, m); },
            [&](int64_t at, int64_t m, std::byte* host) {
              for (int r = 0; r < n; ++r)
                s.to_device(out + (r * count + at) * width, host + (n + r) * m * width, m * width);
            });
        break;
      case Op::all_to_all_v:
        co_await all_to_all_v();
        break;
      case Op::barrier:
        co_await staging().pipeline(
            1, [](int64_t, std::byte*) {},
            [this](int64_t, std::byte*) { return on_host(nullptr, nullptr, 0); }, [](int64_t, std::byte*) {});
        break;
      default:
        NRL_CHECK(false, "{} is no collective", name_of(c.op));
    }
  }

  /// Elements of a block that pass in round k.
  static int64_t piece(int64_t whole, int64_t k, int64_t most) {
    return std::clamp<int64_t>(whole - k * most, 0, most);
  }

  /// Round k of all_to_all_v on host memory.
  Task exchange_round(int64_t k, int64_t most, const std::byte* in, std::byte* out) {
    Call part;
    part.op = Op::all_to_all_v;
    part.dtype = call().dtype;
    part.in = in;
    part.out = out;
    for (const int64_t n : call().send_counts) part.send_counts.push_back(piece(n, k, most));
    for (const int64_t n : call().recv_counts) part.recv_counts.push_back(piece(n, k, most));
    co_await transport().execute(part);
  }

  /// In round k the pairs exchange elements [k * most, (k + 1) * most) of their blocks, so that both ends cut
  /// alike whatever the other blocks are; a rank takes part in as many rounds as its longest block needs.
  Task all_to_all_v() {
    const Call& c = call();
    const auto n = static_cast<size_t>(group().size);
    const int64_t width = size_of(c.dtype);
    const int64_t most = staging().slot_bytes() / 2 / group().size / width;
    int64_t longest = 0;
    for (size_t r = 0; r < n; ++r) longest = std::max({longest, c.send_counts[r], c.recv_counts[r]});
    std::byte* const device_in = static_cast<std::byte*>(const_cast<void*>(c.in));
    auto* device_out = static_cast<std::byte*>(c.out);
    const int64_t half = most * group().size * width;
    /// f(device, host, bytes) for every block's piece of round k.
    const auto pieces = [&](const std::vector<int64_t>& counts, int64_t k, std::byte* device, std::byte* host,
                            const auto& f) {
      for (size_t r = 0; r < n; ++r) {
        const int64_t m = piece(counts[r], k, most) * width;
        f(device + k * most * width, host, m);
        device += counts[r] * width;
        host += m;
      }
    };
    const CopyStreams& s = staging().copies();
    co_await staging().pipeline(
        (longest + most - 1) / most,
        [&](int64_t k, std::byte* host) {
          pieces(c.send_counts, k, device_in, host,
                 [&](std::byte* d, std::byte* h, int64_t bytes) { s.to_host(h, d, bytes); });
        },
        [&](int64_t k, std::byte* host) { return exchange_round(k, most, host, host + half); },
        [&](int64_t k, std::byte* host) {
          pieces(c.recv_counts, k, device_out, host + half,
                 [&](std::byte* d, std::byte* h, int64_t bytes) { s.to_device(d, h, bytes); });
        });
  }

  Task task_;
};

/// Sends leave when their data is in host memory, in the order they were issued; receives land whenever they
/// come. Neither waits for the device inside of the executor.
class StagedMessages final : public StagedWork {
 public:
  using StagedWork::StagedWork;
  ~StagedMessages() override {
    std::erase(group().senders, this);
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
      p.message.tag += kDeviceTag;
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
      if (!all) return moved ? Advance::moved : Advance::waiting;
      finish_in(group().messages.copies().in());
      return Advance::done;
    } catch (...) {
      std::erase(group().senders, this);  // those behind it may go
      throw;
    }
  }

  /// Posts the sends whose data has come from the device, if it is this operation's turn.
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

class StagedCommunicator final : public Communicator {
 public:
  StagedCommunicator(std::unique_ptr<Communicator> own, Communicator& host, device::Runtime& device,
                     const DeviceCommOptions& options)
      : Communicator(host.name(), host.rank(), host.members(), host.ledger()),
        own_(std::move(own)),
        host_(host),
        options_(options) {
    const int64_t least = int64_t{128} * size();
    if (options.staged_slot_bytes < least)
      fail(Exit::config, "staging {} through slots of {} bytes: at least {} are needed", label(),
           options.staged_slot_bytes, least);
    group_ = std::make_shared<StagedGroup>(device, options);
    group_->transport = host.host_transport();
    NRL_CHECK(group_->transport, "{} cannot carry communication of device memory", label());
    group_->ledger = ledger();
    group_->rank = rank();
    group_->size = size();
    group_->label = label();
  }

  ~StagedCommunicator() override {
    Executor& executor = group_->transport->executor();
    constexpr double kForever = 1e9, kPatience = 2;
    if (std::uncaught_exceptions() == 0 && !group_->transport->dropped()) {
      executor.release_finished(kForever);
      return;
    }
    // Operations may be waiting for ranks that never come; they must not find the device gone.
    group_->cancelled = true;
    if (!executor.release_finished(kPatience)) new std::shared_ptr<StagedGroup>(group_);
  }

  std::unique_ptr<Communicator> split(int color, int key, std::string_view name) override {
    return adopt(host_.split(color, key, name));
  }
  std::unique_ptr<Communicator> subgroup(std::span<const int> ranks, std::string_view name) override {
    return adopt(host_.subgroup(ranks, name));
  }
  Communicator& host() override { return host_; }

 private:
  std::unique_ptr<Communicator> adopt(std::unique_ptr<Communicator> host) const {
    if (!host) return nullptr;
    if (host->size() == 1) return make_device_self(std::move(host), group_->runtime);
    Communicator& beneath = *host;
    return std::make_unique<StagedCommunicator>(std::move(host), beneath, group_->runtime, options_);
  }

  std::shared_ptr<Work> submit(Call call, bool blocking) override {
    if (call.stream.native && group_->runtime.capturing(call.stream.native))
      fail(Exit::internal,
           "{} on {}: host-staged communication cannot be captured into a graph. Fix: set "
           "distributed.backend: nccl or turn graphs off",
           name_of(call.op), label());
    const LedgerTicket ticket = enroll(call);
    Executor::Order order{nullptr, call.previous};
    std::shared_ptr<Work> work;
    if (call.messages.empty() && call.op != Op::exchange) {
      order.lane = &group_->transport->lane();
      work = std::make_shared<StagedCollective>(group_, ticket, unwaited(), std::move(call));
    } else {
      work = std::make_shared<StagedMessages>(group_, ticket, unwaited(), std::move(call));
    }
    group_->transport->executor().submit(work, std::move(order), blocking);
    return work;
  }

  std::unique_ptr<Communicator> own_;  // the host communicator where this one owns it
  Communicator& host_;
  DeviceCommOptions options_;
  std::shared_ptr<StagedGroup> group_;
};

}  // namespace

std::unique_ptr<Communicator> make_staged(Communicator& host, device::Runtime& device,
                                          const DeviceCommOptions& options) {
  const std::vector<int64_t> own = {options.staged_slot_bytes};
  std::vector<int64_t> all(static_cast<size_t>(host.size()));
  host.all_gather(own, all);
  for (size_t r = 0; r < all.size(); ++r)
    NRL_CHECK(all[r] == all[0], "staging {}: rank 0 has slots of {} bytes, rank {} of {}", host.label(),
              all[0], r, all[r]);
  return std::make_unique<StagedCommunicator>(nullptr, host, device, options);
}

}  // namespace nrl::comm
