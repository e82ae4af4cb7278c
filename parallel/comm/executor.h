#pragma once
// The one thread of a process that carries out queued communication while the others compute.
//
// Order rule. Collectives of a process run one after another, in the order they were issued, whatever their
// communicator. All ranks together must therefore issue them in an order that some single global sequence
// explains (the rule blocking MPI calls obey as well). Sends and receives start in that order but do not hold
// up what follows.

#include "parallel/comm/ledger.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace nrl::comm {

class Executor;

/// One operation under way. Subclasses say what it does.
class Work {
 public:
  /// `ledger` may be null (not written down); `executor` null means that the operation is carried out by
  /// run_now().
  Work(Ledger* ledger, const LedgerTicket& ticket, Executor* executor,
       std::shared_ptr<std::atomic<int>> unwaited)
      : ledger_(ledger), ticket_(ticket), executor_(executor), unwaited_(std::move(unwaited)) {}
  virtual ~Work() = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  /// True when the result is there.
  virtual bool finished() const { return over(); }
  /// Blocks until finished; carries the operation out in this thread where nothing runs in the other.
  /// Rethrows its error. Called once.
  void wait();
  /// Starts and finishes the operation in the calling thread, outside of any executor.
  void run_now();

 protected:
  /// True when finished, false to be polled. Called once, in the executor.
  virtual bool start() = 0;
  /// True when finished.
  virtual bool poll() { return true; }

  /// Blocks until carried out; a subclass may wait for more.
  virtual void block();
  /// True when carried out, well or not.
  bool over() const { return progress_.load(std::memory_order_acquire) >= Progress::done; }
  bool failed() const { return progress_.load(std::memory_order_acquire) == Progress::failed; }

 private:
  friend class Executor;
  bool advance(bool first);  // start() or poll() with its bookkeeping; true when finished or failed

  Ledger* ledger_;
  LedgerTicket ticket_;
  Executor* executor_;
  std::shared_ptr<std::atomic<int>> unwaited_;
  std::atomic<Progress> progress_{Progress::queued};
  std::exception_ptr error_;
};

/// Pauses of a thread that polls for something. Spins briefly, then yields the core for a while, then sleeps
/// for a part of what it has waited: a core that somebody else needs is given away, and the wait ends at most
/// that part late. Where nobody waits for the outcome it sleeps sooner.
class Backoff {
 public:
  /// `waiters`: threads blocked on the outcome (null: the caller itself is). `spins`: rounds before yielding.
  Backoff(const std::atomic<int>* waiters, int spins) : waiters_(waiters), spins_(spins) {}
  void pause();
  /// The part of pause() that keeps the core or yields it; false when it is time to sleep.
  bool spin();
  /// Since the spinning ended.
  int64_t waited_ns() const { return waited_ns_; }
  void reset() {
    rounds_ = 0;
    begin_ns_ = waited_ns_ = 0;
  }

 private:
  const std::atomic<int>* waiters_;
  int spins_;
  int rounds_ = 0;
  int64_t begin_ns_ = 0;   ///< of the yielding; 0: not begun
  int64_t waited_ns_ = 0;  ///< since then
};

class Executor {
 public:
  Executor() = default;
  /// Ends the thread; operations still queued are dropped.
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// Appends an operation. `blocking`: the caller waits for it at once, so that the thread need not be woken.
  void submit(std::shared_ptr<Work> work, bool blocking);
  /// Returns when `work` is carried out. Takes the thread's part where that is idle.
  void wait(Work& work);
  /// Returns when no operation that is over is held here any more, so that what they use may go: at once, or
  /// after the operation being carried out. False when that takes longer than `seconds`.
  bool let_go(double seconds);
  /// Threads blocked in wait(); null in the callers' own threads. For the Backoff of operations.
  static const std::atomic<int>* current_waiters();

 private:
  void loop();
  bool step();  // run_mutex_ held: polls, starts the next one; true when something was finished or started
  void wake_if_needed();
  void ensure_thread();  // queue_mutex_ held

  std::mutex run_mutex_;  // held while operations are carried out
  std::vector<std::shared_ptr<Work>> active_;
  std::atomic<int> active_count_{0};

  std::mutex queue_mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Work>> queue_;
  bool stop_ = false;
  std::thread thread_;
  std::atomic<int> waiters_{0};
};

}  // namespace nrl::comm
