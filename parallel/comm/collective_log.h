#pragma once
// The log of all communication of a process, collectives and messages: totals for reports, and a ring of the
// latest entries for a flight recorder and the trace.

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/dtype.h"

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

/// Bytes that a rank of a group of `ranks` sends at least, for an operation of `bytes` (CollectiveLog).
/// Divided by time this is the bus bandwidth of nccl-tests, with which groups of any size compare.
double wire_bytes(Op op, double bytes, int ranks);

/// State of an operation.
enum class Progress : uint8_t { queued, running, done, failed };

/// Nanoseconds of the steady clock, the time base of the log.
int64_t now_ns();

/// One operation. Times are in nanoseconds of the steady clock; 0: not reached yet.
struct LogEntry {
  uint64_t id = 0;     ///< counts per process, from 0
  uint64_t seq = 0;    ///< counts the collectives of a communicator, from 0: equal on all of its ranks
  uint32_t group = 0;  ///< index for CollectiveLog::group_label
  Op op = Op::barrier;
  DType dtype = DType::u8;
  Progress progress = Progress::queued;
  int32_t peer = -1;  ///< root of a broadcast, the other rank of a send or receive
  /// send, recv: the tag, and the number among the messages with it to or from `peer` of this communicator,
  /// from 0. The k-th send matches the k-th receive.
  int32_t lane = -1;
  int64_t message = -1;
  int64_t bytes = 0;
  int64_t enqueued_ns = 0, started_ns = 0, ended_ns = 0;
  /// Exposed (non-overlapped) communication: time the caller was blocked in wait(); nccl: its stream.
  int64_t exposed_ns = 0;
};

/// A message's number in its channel: LogEntry::lane and LogEntry::message.
struct MessageNumber {
  int32_t lane = -1;
  int64_t message = -1;
};

/// A communicator of the log.
struct LogGroup {
  std::string name;   ///< "dp"
  std::string label;  ///< "dp[0,2,4,6]"
  int ranks = 1;
  std::vector<int> members;  ///< ranks of the world
  int self = 0;              ///< this process's
};

/// "dp 4 0:2:4 dp[0,2,4,6]": name, ranks, members, label. Members at equal distances are
/// first:distance:count, others separated by commas.
std::string to_line(const LogGroup& group);
/// Inverse. False if the text is no such line, or names more than 1,000,000 members.
bool from_line(std::string_view line, LogGroup& group);

/// Sums over the operations of one kind in the groups of one name.
struct LogTotal {
  std::string group;
  Op op = Op::barrier;
  int ranks = 1;               ///< of a group
  std::string_view algorithm;  ///< of the largest operation: "shared memory"; empty: unknown
  int64_t count = 0;
  int64_t bytes = 0;
  double busy_seconds = 0;     ///< from start to end, waiting for late peers included
  double exposed_seconds = 0;  ///< sum of LogEntry::exposed_ns

  /// wire_bytes() of all operations.
  double wire() const { return wire_bytes(op, static_cast<double>(bytes), ranks); }
};

/// Held by an operation to report its progress; stays valid after its ring entry is overwritten.
struct LogTicket {
  uint64_t id = 0;
  uint32_t total = 0;
  int64_t started_ns = 0;
};

/// Thread-safe; one per process, shared by all communicators.
///
/// `bytes` as nccl-tests counts them: the vector (all_reduce, broadcast), the gathered vector (all_gather),
/// the vector before scattering (reduce_scatter), the bytes that this rank sends (all_to_all, send, exchange)
/// or receives (recv).
class CollectiveLog {
 public:
  static constexpr size_t capacity = 4096;

  CollectiveLog();
  ~CollectiveLog();
  CollectiveLog(const CollectiveLog&) = delete;
  CollectiveLog& operator=(const CollectiveLog&) = delete;

  /// Registers a communicator; several may have one name, their totals are then summed. `members`: ranks of
  /// the world, for readers of groups().
  uint32_t add_group(std::string_view name, std::string_view label, int ranks = 1,
                     std::vector<int> members = {}, int self = 0);
  /// By LogEntry::group.
  std::vector<LogGroup> groups() const;
  /// The label, for example "dp[0,2,4,6]".
  std::string group_label(uint32_t group) const;

  /// `algorithm`: what carries the operation, a literal.
  LogTicket enqueue(uint32_t group, uint64_t seq, Op op, DType dtype, int64_t bytes, int32_t peer,
                    std::string_view algorithm = "", const MessageNumber& number = {});
  void start(LogTicket& ticket);
  /// `busy_ns`: duration, for backends that notice the end late; negative: since start().
  void finish(const LogTicket& ticket, bool failed, int64_t busy_ns = -1);
  void expose(const LogTicket& ticket, int64_t ns);

  /// Memory that outlives the process, for the entries and groups.
  struct Memory {
    LogEntry* entries = nullptr;            ///< capacity of them; entry `id` lies at id % capacity
    std::atomic<uint64_t>* next = nullptr;  ///< id of the next entry
    char* groups = nullptr;                 ///< lines of to_line(), in the order of LogEntry::group
    size_t group_bytes = 0;
    std::atomic<uint32_t>* group_bytes_used = nullptr;
  };
  /// Continues in other memory, which must stay valid; null pointers: in memory of its own again.
  void place(const Memory& memory);

  /// An operation as all of its ranks know it.
  struct Pending {
    uint64_t group = 0;  ///< the same number on all ranks of the communicator; of a message, on its two
    uint64_t sequence = 0;
    int64_t bytes = 0;
    int ranks = 0;
    uint32_t call = 0;   ///< operation and type; of a message the same for sender and receiver
    char text[63] = {};  ///< "all_reduce of dp[0,1]", ends with 0
  };
  /// The operation `id`, if it has not ended. For watchdogs: does not block or allocate; false also while
  /// another thread uses the log.
  bool try_pending(uint64_t id, Pending& pending) const;

  /// The latest entries, oldest first; at most capacity.
  std::vector<LogEntry> latest(size_t count = capacity) const;
  /// Keeps all operations that are issued from now on, until take(), besides the latest ones.
  void record();
  /// Ends record(). Returns the kept operations that have ended, by their start.
  std::vector<LogEntry> take();

  /// Sums since the start or the last reset, ordered by group name and operation;
  /// kinds never used are left out.
  std::vector<LogTotal> totals() const;
  void reset_totals();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace nrl::comm
