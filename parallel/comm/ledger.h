#pragma once
// The log of all communication of a process: totals for reports, a ring of the latest entries for
// the flight recorder and the trace.

#include "core/base/dtype.h"

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace nrl::comm {

enum class Op : uint8_t {
  all_reduce,
  all_gather,
  reduce_scatter,
  all_to_all,
  all_to_all_v,
  broadcast,
  send,
  recv,
  exchange,
  barrier,
  split,
};

/// The spelling used in messages and reports: "all_reduce", ...
std::string_view name_of(Op op);

/// How far an operation has come.
enum class Progress : uint8_t { queued, running, done, failed };

/// Nanoseconds of the steady clock, the time base of the ledger.
int64_t now_ns();

/// One operation. Times are in nanoseconds of the steady clock, 0 when not reached yet.
struct LedgerEntry {
  uint64_t id = 0;     ///< over the process, from 0
  uint64_t seq = 0;    ///< over the communicator, from 0; equal on all of its ranks for collectives
  uint32_t group = 0;  ///< index for Ledger::group_label
  Op op = Op::barrier;
  DType dtype = DType::u8;
  Progress progress = Progress::queued;
  int32_t peer = -1;  ///< root of a broadcast, the other rank of a send or receive
  int64_t bytes = 0;
  int64_t enqueued_ns = 0, started_ns = 0, ended_ns = 0;
  int64_t exposed_ns = 0;  ///< time a caller was blocked in wait(); nccl: time its stream was
};

/// Sums over the operations of one kind in the groups of one name.
struct LedgerTotal {
  std::string group;
  Op op = Op::barrier;
  int64_t count = 0;
  int64_t bytes = 0;
  double busy_seconds = 0;     ///< from start to end; waiting for late peers included
  double exposed_seconds = 0;  ///< callers blocked
};

/// What an operation carries to report its progress; stays valid when its ring entry is overwritten.
struct LedgerTicket {
  uint64_t id = 0;
  uint32_t total = 0;
  int64_t started_ns = 0;
};

/// Thread-safe; one per process, shared by all communicators.
///
/// `bytes` counts, as nccl-tests does: the vector (all_reduce, broadcast), the gathered vector (all_gather),
/// the vector before scattering (reduce_scatter), what this rank sends (all_to_all, send, exchange) or
/// receives (recv).
class Ledger {
 public:
  static constexpr size_t kCapacity = 4096;

  Ledger();
  ~Ledger();
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  /// Registers a communicator; several may have one name, their totals are then summed.
  uint32_t add_group(std::string_view name, std::string_view label);
  /// The label, for example "dp[0,2,4,6]".
  std::string group_label(uint32_t group) const;

  LedgerTicket enqueue(uint32_t group, uint64_t seq, Op op, DType dtype, int64_t bytes, int32_t peer);
  void start(LedgerTicket& ticket);
  /// `busy_ns`: how long it took; negative: since start(). Given where the end is noticed late.
  void finish(const LedgerTicket& ticket, bool failed, int64_t busy_ns = -1);
  void expose(const LedgerTicket& ticket, int64_t ns);

  /// The latest entries, oldest first; at most kCapacity.
  std::vector<LedgerEntry> latest(size_t count = kCapacity) const;
  /// Sums since the start or the last reset, ordered by group name and operation; kinds never used are left
  /// out.
  std::vector<LedgerTotal> totals() const;
  void reset_totals();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace nrl::comm
