#pragma once
// Communication among a group of ranks. Backends: self (one rank), mpi (host memory), staged and nccl (device
// memory, world/make_device.h); recording wraps any of them.
//
// Ranks of a group must issue the same collectives with the same arguments in the same order; executor.h has
// the order rule. Results do not depend on timing or backend. Sums add the ranks' values in rank order; where
// several hosts have several ranks of a group each, first those of each host, in rank order, then the hosts'
// sums (mpi/mpi_group.h). The exception is nccl, which chooses its own order (world/make_device.h).

#include <atomic>
#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/base/dtype.h"
#include "parallel/comm/collective_log.h"

namespace nrl::comm {

class HostTransport;
class Ledger;
class Work;

/// Greatest tag of a message.
inline constexpr int max_tag = 8191;

/// Integer sums wrap around; max and min propagate NaN.
enum class Reduce : uint8_t { sum, max, min };

/// Elements in memory owned by the caller; must stay valid and untouched until the operation has
/// been waited for.
struct ConstView {
  const void* data = nullptr;
  int64_t count = 0;
  DType dtype = DType::u8;

  ConstView() = default;
  ConstView(const void* p, int64_t n, DType t) : data(p), count(n), dtype(t) {}
  template <class T, size_t N>
  ConstView(std::span<T, N> s)
      : data(s.data()),
        count(static_cast<int64_t>(s.size())),
        dtype(dtype_of<std::remove_const_t<T>>::value) {}
  template <class T>
  ConstView(const std::vector<T>& v) : ConstView(std::span<const T>(v)) {}
  int64_t bytes() const { return count * size_of(dtype); }
};

/// A writable ConstView.
struct View {
  void* data = nullptr;
  int64_t count = 0;
  DType dtype = DType::u8;

  View() = default;
  View(void* p, int64_t n, DType t) : data(p), count(n), dtype(t) {}
  template <class T, size_t N>
  requires(!std::is_const_v<T>) View(std::span<T, N> s)
      : data(s.data()), count(static_cast<int64_t>(s.size())), dtype(dtype_of<T>::value) {}
  template <class T>
  View(std::vector<T>& v) : View(std::span<T>(v)) {}
  operator ConstView() const { return {data, count, dtype}; }
  int64_t bytes() const { return count * size_of(dtype); }
};

/// The device stream (device::StreamHandle) that orders device memory: the operation starts after
/// the work already in it, and work enqueued after wait() sees the result. Without one (null) the
/// memory must be idle when a device operation is issued, and wait() blocks until the result is
/// available. Must be null for host memory.
struct StreamRef {
  void* native = nullptr;
};

/// One message of an exchange.
struct Message {
  enum class Kind : uint8_t { send, recv };
  Kind kind;
  View data;  ///< read only for a send
  int peer;   ///< rank in the group
  int tag = 0;

  static Message send(ConstView v, int to, int tag = 0) {
    return {Kind::send, {const_cast<void*>(v.data), v.count, v.dtype}, to, tag};
  }
  static Message recv(View v, int from, int tag = 0) { return {Kind::recv, v, from, tag}; }
};

/// The buffers of one of several gathers or reductions in one operation.
struct Operands {
  ConstView in;
  View out;
};

/// An operation in flight. Each must be waited for exactly once before its communicator is destroyed; a copy
/// refers to the same operation.
class [[nodiscard]] Handle {
 public:
  Handle() = default;
  explicit Handle(std::shared_ptr<Work> work) : work_(std::move(work)) {}

  /// Blocks until finished and empties the handle; rethrows the operation's error. No-op for an empty handle.
  /// An operation ordered by a stream makes the stream wait instead of the host (world/make_device.h).
  void wait();
  /// True when finished (or empty); does not block and does not replace wait().
  bool done() const;
  bool empty() const { return work_ == nullptr; }

 private:
  friend struct After;
  std::shared_ptr<Work> work_;
};

/// Dependencies of an asynchronous operation: the work already in a device stream, another operation, or
/// both. The host waits for neither, so operations can be chained:
///
///   Handle sum = shard.reduce_scatter_async(gradients, own, Reduce::sum, stream);
///   Handle all = replicas.all_reduce_async(own, Reduce::sum, {stream, sum});
///
/// The other operation may belong to any group of this process; both must still be waited for. If it fails,
/// this one fails with the same error. An nccl operation may only depend on operations that the host has
/// finished issuing; those of nccl groups always are.
struct After {
  After() = default;
  After(StreamRef ordered_by) : stream(ordered_by) {}
  After(const Handle& operation) : previous(operation.work_) {}
  After(StreamRef ordered_by, const Handle& operation) : stream(ordered_by), previous(operation.work_) {}

  StreamRef stream;
  std::shared_ptr<Work> previous;  ///< null: none
};

/// A checked operation, as passed to backends.
struct Call {
  Op op = Op::barrier;
  Reduce reduce = Reduce::sum;
  DType dtype = DType::u8;
  const void* in = nullptr;
  void* out = nullptr;
  /// Elements of `out` (all_reduce, reduce_scatter, broadcast), of `in` (all_gather), or per pair.
  int64_t count = 0;
  /// all_gather, reduce_scatter: further buffers of the same operation. Ranks must have as many.
  struct Buffers {
    const void* in = nullptr;
    void* out = nullptr;
    int64_t count = 0;
  };
  std::vector<Buffers> more;
  int peer = -1;                                  ///< root of a broadcast; other rank of a single message
  std::vector<int64_t> send_counts, recv_counts;  ///< all_to_all_v
  std::vector<Message> messages;                  ///< send, recv, exchange
  StreamRef stream;
  std::shared_ptr<Work> previous;  ///< null: none

  /// Bytes as the collective log counts them, in a group of `size` ranks.
  int64_t bytes(int size) const;
  /// A call for each of its buffers: this one without `more`, and one for each of those. Without `stream` and
  /// `previous`.
  std::vector<Call> parts() const;
};

/// Memory that a group has registered; unregistered by the destructor, which must run before the memory is
/// released.
struct Registration {
  virtual ~Registration() = default;
};

/// A group of ranks. Methods must be called by one thread at a time. Every operation has a blocking and an
/// asynchronous form. Reductions take f32, bf16 and f16 (added in fp32, rounded once), f64, i32, i64 and
/// u8; the others move any element type. Wrong arguments are an internal error (exit 70).
class Communicator {
 public:
  /// Collective: all ranks must destroy their communicators in the same order; not collective during stack
  /// unwinding. Operations that were not waited for are reported and make World::finalize fail.
  virtual ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }
  /// What the group is for: "world", "dp", "tp-cp".
  const std::string& name() const { return name_; }
  /// World ranks of the members, in the order of their ranks here.
  const std::vector<int>& members() const { return members_; }
  /// Name and members, "dp[0,2,4,6]" (shortened above 8 members).
  std::string label() const;

  /// In place.
  Handle all_reduce_async(View data, Reduce op = Reduce::sum, const After& after = {});
  /// `out` holds size() blocks of in.count elements in rank order; `in` may be this rank's block of `out`.
  Handle all_gather_async(ConstView in, View out, const After& after = {});
  /// `in` holds size() blocks of out.count elements; `out` may be this rank's block of `in`. The other blocks
  /// of `in` keep their contents.
  Handle reduce_scatter_async(ConstView in, View out, Reduce op = Reduce::sum, const After& after = {});
  /// Several of these as one operation: with nccl one kernel, which pays its latency once; elsewhere one
  /// after another. All of one element type; at least one. The collective log counts one call.
  Handle all_gather_async(std::span<const Operands> each, const After& after = {});
  Handle reduce_scatter_async(std::span<const Operands> each, Reduce op = Reduce::sum,
                              const After& after = {});
  /// Block r of `in` goes to rank r; block r of `out` comes from it. Not in place.
  Handle all_to_all_async(ConstView in, View out, const After& after = {});
  /// The same with blocks of send_counts[r] and recv_counts[r] elements one after the other.
  Handle all_to_all_v_async(ConstView in, std::span<const int64_t> send_counts, View out,
                            std::span<const int64_t> recv_counts, const After& after = {});
  Handle broadcast_async(View data, int root, const After& after = {});
  /// Messages of a pair of ranks with one tag (0 to max_tag) arrive in the order they were sent; both ends
  /// must name the same number of bytes. Pipelines use Channel (channel.h), which behaves alike on all
  /// backends.
  Handle send_async(ConstView data, int to, int tag = 0, const After& after = {});
  Handle recv_async(View data, int from, int tag = 0, const After& after = {});
  /// Concurrent messages, in no order. Only here may a rank send to itself, with both ends in one exchange.
  Handle exchange_async(std::vector<Message> messages, const After& after = {});
  Handle barrier_async(const After& after = {});

  // The blocking forms.
  void all_reduce(View data, Reduce op = Reduce::sum) {
    block([&] { return all_reduce_async(data, op); });
  }
  void all_gather(ConstView in, View out) {
    block([&] { return all_gather_async(in, out); });
  }
  void reduce_scatter(ConstView in, View out, Reduce op = Reduce::sum) {
    block([&] { return reduce_scatter_async(in, out, op); });
  }
  void all_to_all(ConstView in, View out) {
    block([&] { return all_to_all_async(in, out); });
  }
  void all_to_all_v(ConstView in, std::span<const int64_t> send_counts, View out,
                    std::span<const int64_t> recv_counts) {
    block([&] { return all_to_all_v_async(in, send_counts, out, recv_counts); });
  }
  void broadcast(View data, int root) {
    block([&] { return broadcast_async(data, root); });
  }
  void send(ConstView data, int to, int tag = 0) {
    block([&] { return send_async(data, to, tag); });
  }
  void recv(View data, int from, int tag = 0) {
    block([&] { return recv_async(data, from, tag); });
  }
  void exchange(std::vector<Message> messages) {
    block([&] { return exchange_async(std::move(messages)); });
  }
  void barrier() {
    block([&] { return barrier_async(); });
  }

  /// Groups of equal color, ordered by (key, rank). Collective; null for ranks with a negative color.
  virtual std::unique_ptr<Communicator> split(int color, int key, std::string_view name) = 0;
  /// The group of these ranks, in this order. Called by its members only; null for an empty list.
  virtual std::unique_ptr<Communicator> subgroup(std::span<const int> ranks, std::string_view name) = 0;

  /// Gathers one text of every rank, in rank order. Collective; for start-up and error paths. Texts
  /// go through host().
  std::vector<std::string> gather_texts(std::string_view text);
  /// The same on `root` only; empty elsewhere. No other rank holds more than its own text and 8 bytes per
  /// rank.
  std::vector<std::string> gather_texts_to(std::string_view text, int root);
  /// Replaces `text` by the root's. Collective.
  void broadcast_text(std::string& text, int root);

  /// The communicator of the same ranks for host memory: this one, or the one below a device communicator.
  virtual Communicator& host() { return *this; }
  /// Throws an asynchronous error (a lost peer) that no wait() would report; for loops that only replay
  /// captured graphs. Does not block.
  virtual void check() {}
  /// Connects `sender` to `receiver`, one of which is this rank, so that messages this way do not block the
  /// host when they are issued. Collective over the two; no-op for backends that never block there.
  virtual void connect(int sender, int receiver) {
    (void)sender;
    (void)receiver;
  }
  /// Registers memory for operations of the group, which then need no copies in buffers of the library. All
  /// ranks must register memory, and pass the same offsets in it to each collective. Null: copied as before.
  virtual std::unique_ptr<Registration> register_memory(void* data, size_t bytes) {
    (void)data;
    (void)bytes;
    return nullptr;
  }
  /// True when all operations of the group run one after another, messages included (nccl). Messages that
  /// depend on each other then need one exchange or separate groups (Channel).
  virtual bool single_fifo() const { return false; }
  /// While it is dry, operations are complete when they are issued, execute nothing and touch no memory;
  /// `ledger`, unless null, counts them under `group`. No operation may be in flight.
  void set_dry(bool dry, Ledger* ledger = nullptr, int group = 0);
  /// For communicators built on this one; null for a single rank.
  virtual std::shared_ptr<HostTransport> host_transport() { return nullptr; }

  /// Handles not waited for yet.
  int outstanding() const { return unwaited_->load(std::memory_order_relaxed); }
  /// Null when operations are not logged.
  CollectiveLog* collective_log() const { return log_; }
  /// Its LogEntry::group.
  uint32_t log_group() const { return group_; }

 protected:
  Communicator(std::string name, int rank, std::vector<int> members, CollectiveLog* log);

  /// Starts a checked call. `blocking`: the caller waits for it immediately.
  virtual std::shared_ptr<Work> submit(Call call, bool blocking) = 0;
  /// What carries a call, for the log: a literal, "shared memory".
  virtual std::string_view algorithm(const Call& call) const {
    (void)call;
    return "";
  }
  /// Logs a call with the next sequence number; the ticket goes to its Work.
  LogTicket log_call(const Call& call);
  /// Starts a checked call on another communicator (for wrappers), to be waited for there.
  static std::shared_ptr<Work> submit_to(Communicator& inner, Call call, bool blocking) {
    return inner.start(std::move(call), blocking);
  }
  const std::shared_ptr<std::atomic<int>>& unwaited() const { return unwaited_; }

 private:
  std::shared_ptr<Work> start(Call call, bool blocking);
  /// Calls `issue` and waits for the operation it returns.
  template <class Issue>
  void block(Issue issue) {
    struct Scope {
      explicit Scope(bool& f) : flag(f) { flag = true; }
      ~Scope() { flag = false; }
      bool& flag;
    };
    Handle handle;
    {
      const Scope scope(blocking_);
      handle = issue();
    }
    handle.wait();
  }
  Handle issue(Call call, const After& after);
  Call gather_call(ConstView in, View out) const;
  Call scatter_call(ConstView in, View out, Reduce op) const;
  /// One call of all of these.
  Call joined(std::vector<Call> calls) const;
  Handle message(Op op, std::vector<Message> messages, const After& after);
  Call make(Op op, DType dtype, const void* in, void* out, int64_t count) const;

  std::string name_;
  int rank_;
  std::vector<int> members_;
  CollectiveLog* log_;
  uint32_t group_ = 0;
  uint64_t seq_ = 0;
  struct Route {
    Op op;
    int peer, tag;
    auto operator<=>(const Route&) const = default;
  };
  std::map<Route, int64_t> messages_;  // single messages so far
  bool dry_ = false;
  Ledger* ledger_ = nullptr;
  int ledger_group_ = 0;
  bool blocking_ = false;  // inside block(): the caller waits for the operation immediately
  std::shared_ptr<std::atomic<int>> unwaited_ = std::make_shared<std::atomic<int>>(0);
};

/// Number of communicators destroyed with operations not waited for, in this process.
int leaked_communicators();

}  // namespace nrl::comm
