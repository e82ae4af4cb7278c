#pragma once
// The control plane of a run: a thread per process that finds lost, stopped and hung ranks, and ends the
// process with the verdict that all ranks share. README.md explains states and limits.

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/control/verdict.h"

namespace nrl::control {

/// Collective calls over the launcher's ranks, used by connect() only.
struct Bootstrap {
  int rank = 0, size = 1;
  int node =
      0;  ///< the same number on ranks of a host; ranks that do not share /dev/shm become nodes of their own
  std::function<void(std::span<std::byte>)> broadcast;  ///< from rank 0
  std::function<void(std::span<const std::byte>, std::span<std::byte>)> allgather;
};

struct Options {
  bool require = false;   ///< refuse to run where nodes cannot connect, instead of a warning
  std::string interface;  ///< name or IPv4 address; "": of the default route
  double heartbeat_timeout_s = 10, network_timeout_s = 30;
  double connect_timeout_s = 60;
  bool paces = false;  ///< measure the pace of ranks
  std::string run_id;  ///< letters, digits and dashes; "": a random one
  int attempt = 1;
};

/// The end of the run as this process sees it.
struct Failure {
  const Verdict& verdict;
  std::span<const Suspicion> evidence;  ///< known here; `when` is monotonic_now()'s time
  bool decided_here;                    ///< this rank is the root, or the deputy of a part without one
};

/// Calls from the threads of the control plane. All must be set but `notice` and `last_words`.
struct Hooks {
  std::function<StatusSample()> sample;  ///< on the control thread: must not block, allocate or lock
  PhaseName phase_name = nullptr;
  /// On the helper thread, once, before the process ends: write files, flush output. It has leave_budget; a
  /// call that takes longer is left behind.
  std::function<void(const Failure&)> leave;
  std::function<void(Notice, int rank)> notice;  ///< on the helper thread: a warning to print
  /// On the control thread, after dying(): appends how this process ends.
  std::function<void(Text<398>&)> last_words;
};

inline constexpr Nanos leave_budget = 1'000'000'000;

/// One per process. Before connect() it is a guard: a thread without sockets that ends the process with exit
/// code 80 if connect() does not return within the limit, or if the launcher ends.
class Control {
 public:
  /// `watch_launcher`: the end of the parent process is a failure; for processes of mpirun and srun only.
  Control(double start_timeout_s, bool watch_launcher);
  /// Stops the threads. Without finish(), the others see a process that ended without a message.
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  /// Collective. Returns a warning, the same on all ranks, if nodes cannot reach each other: then each node
  /// is on its own. Throws Error (Exit::unavailable), on all ranks, if `require` is set instead. Call at most
  /// once.
  std::string connect(const Options& options, const Bootstrap& bootstrap, const Hooks& hooks);
  bool connected() const;
  const Topology& topology() const;  ///< after connect(): the nodes that verdicts name

  /// Ends the run: evidence of this rank, or of a peer that it lost (Evidence::secondary). Any thread, after
  /// connect(). All ranks leave with `exit_code`, unless stronger evidence wins. Does not return.
  [[noreturn]] void fail(Evidence evidence, int exit_code, std::string_view text, Kind kind = Kind::error);
  /// For the handler of a fatal signal: tells the others, with Hooks::last_words, and returns then, or after
  /// 300 ms. Async-signal-safe.
  void dying() noexcept;
  /// Reading of the pace of a rank (Options::paces): how many there were so far, and the last one.
  struct PaceReading {
    uint32_t count = 0;
    Pace pace;
  };
  /// By rank, on the root, after connect(); empty elsewhere. Any thread.
  std::vector<PaceReading> paces() const;
  /// The process of a rank of this node, after connect(); 0: of another node, or its number means nothing
  /// here.
  int process_of(int rank) const;
  /// For rank 0: a majority of nodes is in reach and no evidence of a failure is known. Not in the first
  /// second after connect(). True without a connection.
  bool may_commit() const;
  /// Evidence of a failure is known here: a signal to stop is the launcher's clean-up, and no request.
  bool is_failing() const;
  /// Waits until all ranks of the subtree are done. Call after the last collective; then the process may end.
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace nrl::control
