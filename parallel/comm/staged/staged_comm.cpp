#include "parallel/comm/staged/staged_comm.h"

#include "core/base/error.h"
#include "parallel/comm/host_transport.h"
#include "parallel/comm/self/self_comm.h"
#include "parallel/comm/staged/staging.h"

#include <algorithm>
#include <atomic>
#include <exception>

namespace nrl::comm {

namespace {

/// What the operations of a group need; outlives the communicator as long as one of them.
struct StagedGroup {
  std::shared_ptr<Staging> staging;
  std::shared_ptr<HostTransport> transport;
  Ledger* ledger = nullptr;
  int rank = 0, size = 1;
  std::string label;
  std::atomic<bool> cancelled{false};  ///< the device may be gone
};

/// An operation of the group, ordered by events on both ends.
class StagedWork : public Work {
 public:
  StagedWork(std::shared_ptr<StagedGroup> group, const LedgerTicket& ticket,
             std::shared_ptr<std::atomic<int>> unwaited, Call call)
      : Work(group->ledger, ticket, &group->transport->executor(), std::move(unwaited)),
        group_(std::move(group)),
        call_(std::move(call)),
        finished_(staging().ends().take()) {
    if (!call_.stream.native) return;
    ready_ = staging().events().take();
    ready_->record(call_.stream.native);
    try {
      ready_->done();
    } catch (const Error& e) {
      fail(e.code(),
           "{} on {}: staged communication cannot be recorded into a graph (set distributed.backend: nccl or "
           "turn graphs off), or the device has failed: {}",
           name_of(call_.op), group_->label, e.what());
    }
  }

  bool finished() const override { return over() && (failed() || finished_->done()); }

 protected:
  Staging& staging() const { return *group_->staging; }
  HostTransport& transport() const { return *group_->transport; }
  const Call& call() const { return call_; }
  StagedGroup& group() const { return *group_; }

  void begin() {
    NRL_CHECK(!group_->cancelled, "{} on {}: the group is gone", name_of(call_.op), group_->label);
    staging().runtime().bind_thread();
    if (ready_) staging().follow(*ready_.operator->());
  }
  void end() { staging().mark(*finished_.operator->()); }
  void carry_on() const {
    if (group_->cancelled) fail(Exit::internal, "{} on {} was given up", name_of(call_.op), group_->label);
  }

 private:
  void block() override {
    Work::block();
    if (failed()) return;
    if (call_.stream.native)
      finished_->wait_in(call_.stream.native);
    else
      finished_->synchronize();
  }

  std::shared_ptr<StagedGroup> group_;
  Call call_;
  EventPool::Loan ready_, finished_;
};

class StagedCollective final : public StagedWork {
 public:
  using StagedWork::StagedWork;

 private:
  bool start() override {
    try {
      begin();
      carry_out();
      end();
    } catch (...) {
      if (!group().cancelled) staging().settle();
      throw;
    }
    return true;
  }

  /// `whole` elements of every block in chunks of at most `most`: f(first element, elements) for each.
  template <class Out, class Meet, class In>
  void by_chunks(int64_t whole, int64_t most, Out out, Meet meet, In in) {
    const auto size = [=](int64_t k) { return std::min(most, whole - k * most); };
    staging().pipeline((whole + most - 1) / most, [&](int64_t k, std::byte* m) { out(k * most, size(k), m); },
                       [&](int64_t k, std::byte* m) { meet(size(k), m); },
                       [&](int64_t k, std::byte* m) { in(k * most, size(k), m); }, transport().backoff());
  }

  /// The call on host memory for a chunk.
  void meet(const std::byte* in, std::byte* out, int64_t count) {
    Call c;
    c.op = call().op;
    c.reduce = call().reduce;
    c.dtype = call().dtype;
    c.in = in;
    c.out = out;
    c.count = count;
    c.peer = call().peer;
    transport().execute(c);
    carry_on();
  }

  void carry_out() {
    const Call& c = call();
    const int n = group().size, me = group().rank;
    const int64_t width = size_of(c.dtype), slot = staging().slot_bytes() / width, count = c.count;
    const auto* in = static_cast<const std::byte*>(c.in);
    auto* out = static_cast<std::byte*>(c.out);
    Staging& s = staging();
    switch (c.op) {
      case Op::all_reduce:
        return by_chunks(
            count, slot,
            [&](int64_t at, int64_t m, std::byte* host) { s.to_host(host, in + at * width, m * width); },
            [&](int64_t m, std::byte* host) { meet(host, host, m); },
            [&](int64_t at, int64_t m, std::byte* host) { s.to_device(out + at * width, host, m * width); });
      case Op::broadcast:
        return by_chunks(
            count, slot,
            [&](int64_t at, int64_t m, std::byte* host) {
              if (me == c.peer) s.to_host(host, in + at * width, m * width);
            },
            [&](int64_t m, std::byte* host) { meet(host, host, m); },
            [&](int64_t at, int64_t m, std::byte* host) {
              if (me != c.peer) s.to_device(out + at * width, host, m * width);
            });
      case Op::all_gather:
        return by_chunks(
            count, slot / n,
            [&](int64_t at, int64_t m, std::byte* host) {
              s.to_host(host + me * m * width, in + at * width, m * width);
            },
            [&](int64_t m, std::byte* host) { meet(host + me * m * width, host, m); },
            [&](int64_t at, int64_t m, std::byte* host) {
              for (int r = 0; r < n; ++r) {
                std::byte* to = out + (r * count + at) * width;
                if (to != in + at * width) s.to_device(to, host + r * m * width, m * width);
              }
            });
      case Op::reduce_scatter:
        return by_chunks(
            count, slot / n,
            [&](int64_t at, int64_t m, std::byte* host) {
              for (int r = 0; r < n; ++r)
                s.to_host(host + r * m * width, in + (r * count + at) * width, m * width);
            },
            [&](int64_t m, std::byte* host) { meet(host, host + me * m * width, m); },
            [&](int64_t at, int64_t m, std::byte* host) {
              s.to_device(out + at * width, host + me * m * width, m * width);
            });
      case Op::all_to_all:
        return by_chunks(
            count, slot / 2 / n,
            [&](int64_t at, int64_t m, std::byte* host) {
              for (int r = 0; r < n; ++r)
                s.to_host(host + r * m * width, in + (r * count + at) * width, m * width);
            },
            [&](int64_t m, std::byte* host) { meet(host, host + n * m * width, m); },
            [&](int64_t at, int64_t m, std::byte* host) {
              for (int r = 0; r < n; ++r)
                s.to_device(out + (r * count + at) * width, host + (n + r) * m * width, m * width);
            });
      case Op::all_to_all_v:
        return all_to_all_v();
      case Op::barrier:
        return s.pipeline(
            1, [](int64_t, std::byte*) {}, [&](int64_t, std::byte*) { meet(nullptr, nullptr, 0); },
            [](int64_t, std::byte*) {}, transport().backoff());
      default:
        NRL_CHECK(false, "{} is no collective", name_of(c.op));
    }
  }

  /// In round k the pairs exchange elements [k * most, (k + 1) * most) of their blocks, so that both ends cut
  /// alike whatever the other blocks are; a rank takes part in as many rounds as its longest block needs.
  void all_to_all_v() {
    const Call& c = call();
    const auto n = static_cast<size_t>(group().size);
    const int64_t width = size_of(c.dtype);
    const int64_t most = staging().slot_bytes() / 2 / group().size / width;
    int64_t longest = 0;
    for (size_t r = 0; r < n; ++r) longest = std::max({longest, c.send_counts[r], c.recv_counts[r]});
    const auto piece = [most](int64_t whole, int64_t k) {
      return std::clamp<int64_t>(whole - k * most, 0, most);
    };
    std::byte* const device_in = static_cast<std::byte*>(const_cast<void*>(c.in));
    auto* device_out = static_cast<std::byte*>(c.out);
    const int64_t half = most * group().size * width;
    /// f(device, host, bytes) for every block's piece of round k.
    const auto pieces = [&](const std::vector<int64_t>& counts, int64_t k, std::byte* device, std::byte* host,
                            const auto& f) {
      for (size_t r = 0; r < n; ++r) {
        const int64_t m = piece(counts[r], k) * width;
        f(device + k * most * width, host, m);
        device += counts[r] * width;
        host += m;
      }
    };
    staging().pipeline(
        (longest + most - 1) / most,
        [&](int64_t k, std::byte* host) {
          pieces(c.send_counts, k, device_in, host,
                 [&](std::byte* d, std::byte* h, int64_t bytes) { staging().to_host(h, d, bytes); });
        },
        [&](int64_t k, std::byte* host) {
          Call part;
          part.op = Op::all_to_all_v;
          part.dtype = c.dtype;
          part.in = host;
          part.out = host + half;
          for (size_t r = 0; r < n; ++r) {
            part.send_counts.push_back(piece(c.send_counts[r], k));
            part.recv_counts.push_back(piece(c.recv_counts[r], k));
          }
          transport().execute(part);
          carry_on();
        },
        [&](int64_t k, std::byte* host) {
          pieces(c.recv_counts, k, device_out, host + half,
                 [&](std::byte* d, std::byte* h, int64_t bytes) { staging().to_device(d, h, bytes); });
        },
        transport().backoff());
  }
};

/// Sends leave from start(), which waits for this device only, and hence in the order they were issued and
/// before anything that follows can block; receives land whenever they come.
class StagedMessages final : public StagedWork {
 public:
  using StagedWork::StagedWork;
  ~StagedMessages() override {
    for (Part& p : parts_)
      if (p.buffer) staging().abandon(std::move(p.buffer));
  }

 private:
  struct Part {
    Message message;
    std::unique_ptr<Staging::Buffer> buffer;
    EventPool::Loan copied;
    std::unique_ptr<PendingMessages> pending;
  };

  bool start() override {
    begin();
    for (const Message& m : call().messages) {
      Part p{m, staging().take(m.data.bytes()), {}, nullptr};
      p.message.data.data = p.buffer->memory.data();
      parts_.push_back(std::move(p));
    }
    for (size_t i = 0; i < parts_.size(); ++i) {
      Part& p = parts_[i];
      if (p.message.kind == Message::Kind::recv) {
        p.pending = transport().post({p.message});
        continue;
      }
      staging().to_host(p.buffer->memory.data(), call().messages[i].data.data, p.message.data.bytes());
      p.copied = staging().events().take();
      staging().mark_out(*p.copied.operator->());
    }
    for (Part& p : parts_) {
      if (p.message.kind == Message::Kind::recv) continue;
      Staging::await(*p.copied.operator->(), transport().backoff());
      p.pending = transport().post({p.message});
    }
    return poll();
  }

  bool poll() override {
    carry_on();
    staging().runtime().bind_thread();
    bool all = true;
    for (size_t i = 0; i < parts_.size(); ++i) {
      Part& p = parts_[i];
      if (!p.buffer) continue;
      if (!p.pending->test()) {
        all = false;
        continue;
      }
      const bool lands = p.message.kind == Message::Kind::recv;
      if (lands)
        staging().to_device(call().messages[i].data.data, p.buffer->memory.data(), p.message.data.bytes());
      staging().give(std::move(p.buffer), lands);
    }
    if (all) end();
    return all;
  }

  std::vector<Part> parts_;
};

class StagedCommunicator final : public Communicator {
 public:
  StagedCommunicator(std::unique_ptr<Communicator> own, Communicator& host, std::shared_ptr<Staging> staging)
      : Communicator(host.name(), host.rank(), host.members(), host.ledger()),
        own_(std::move(own)),
        host_(host),
        group_(std::make_shared<StagedGroup>()) {
    const int64_t least = int64_t{128} * size();
    if (staging->slot_bytes() < least)
      fail(Exit::config, "staging {} through slots of {} bytes: at least {} are needed", label(),
           staging->slot_bytes(), least);
    group_->staging = std::move(staging);
    group_->transport = host.host_transport();
    NRL_CHECK(group_->transport, "{} cannot carry communication of device memory", label());
    group_->ledger = ledger();
    group_->rank = rank();
    group_->size = size();
    group_->label = label();
  }

  ~StagedCommunicator() override {
    Executor& executor = group_->transport->executor();
    constexpr double kForEver = 1e9, kPatience = 2;
    if (std::uncaught_exceptions() == 0 && !group_->transport->dropped()) {
      executor.let_go(kForEver);
      return;
    }
    // Operations may be waiting for ranks that never come; they must not find the device gone.
    group_->cancelled = true;
    if (!executor.let_go(kPatience)) new std::shared_ptr<StagedGroup>(group_);
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
    if (host->size() == 1) return make_device_self(std::move(host), group_->staging->runtime());
    Communicator& beneath = *host;
    return std::make_unique<StagedCommunicator>(std::move(host), beneath, group_->staging);
  }

  std::shared_ptr<Work> submit(Call call, bool blocking) override {
    const LedgerTicket ticket = enroll(call);
    std::shared_ptr<Work> work;
    if (call.messages.empty() && call.op != Op::exchange)
      work = std::make_shared<StagedCollective>(group_, ticket, unwaited(), std::move(call));
    else
      work = std::make_shared<StagedMessages>(group_, ticket, unwaited(), std::move(call));
    group_->transport->executor().submit(work, blocking);
    return work;
  }

  std::unique_ptr<Communicator> own_;  // the host communicator where this one owns it
  Communicator& host_;
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
  constexpr int kSlots = 2;
  return std::make_unique<StagedCommunicator>(
      nullptr, host, std::make_shared<Staging>(device, options.staged_slot_bytes, kSlots));
}

}  // namespace nrl::comm
