#pragma once
// Carries out queued communication: in the thread that waits for it, or in a thread of its own while the
// others compute.
//
// Order rule. Collectives of a group run one after another, in the order they were issued, which must be the
// same on all of its ranks. Collectives of different groups and messages do not wait for each other: whatever
// an operation waits for, all others in flight are carried on. An operation issued After another one starts
// when that one is over. nccl alone is stricter (make_device.h).

#include "parallel/comm/backoff.h"
#include "parallel/comm/ledger.h"
#include "parallel/comm/task.h"

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

/// A futex that ranks of the host ring for a rank that sleeps; lies in shared memory.
struct Bell {
  std::atomic<uint32_t> rings;
  std::atomic<uint32_t> sleeping;  ///< not 0: the owner may sleep until the next ring

  /// For the owner's peers, after they wrote what it may wait for (sequentially consistent).
  void ring_sleeper() {
    if (sleeping.load(std::memory_order_seq_cst) > 0) ring();
  }
  void ring();
  /// Sleeps until `rings` differs from `seen`, at most a second.
  void sleep(uint32_t seen);
};

/// Operations of one lane run one after another: the collectives of a group. The operations must keep it
/// alive: the executor may use it a moment longer than wait() takes.
class Lane {
  friend class Executor;
  bool busy_ = false;
};

/// One operation in flight. Subclasses say what it does.
class Work {
 public:
  /// `ledger` may be null (not logged); `executor` null means that the operation is carried out by run_now().
  Work(Ledger* ledger, const LedgerTicket& ticket, Executor* executor,
       std::shared_ptr<std::atomic<int>> unwaited)
      : ledger_(ledger), ticket_(ticket), executor_(executor), unwaited_(std::move(unwaited)) {}
  virtual ~Work() = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  /// True when the result is there.
  virtual bool finished() const { return over(); }
  /// True when nothing is left for the host to do: an operation that comes after this one may start, on a
  /// device in a stream that order_stream() put behind it.
  virtual bool carried_out() const { return over(); }
  /// Puts a device stream (device::StreamHandle) behind the result. The operation has been carried out.
  virtual void order_stream(void* stream) const { (void)stream; }
  /// Carries the operation out; null where that happens when it is issued.
  virtual Executor* executor() const { return executor_; }
  /// The error it failed with, once it is over.
  virtual std::exception_ptr error() const { return over() ? error_ : nullptr; }

  /// Blocks until finished; carries the operation out in this thread if the executor's thread is idle.
  /// Rethrows its error. Called once.
  void wait();
  /// Starts and finishes the operation in the calling thread, outside of any executor.
  void run_now();

 protected:
  /// Called once, in the executor.
  virtual Advance start() = 0;
  /// Called until it returns done.
  virtual Advance poll() { return Advance::done; }
  /// What is rung when the operation may go on, valid until then; null where it must be polled.
  virtual Bell* bell() { return nullptr; }

  /// Blocks until carried out; a subclass may wait for more.
  virtual void block();
  /// True when carried out, well or not.
  bool over() const { return progress_.load(std::memory_order_acquire) >= Progress::done; }
  bool failed() const { return progress_.load(std::memory_order_acquire) == Progress::failed; }

 private:
  friend class Executor;
  Advance advance();  // start() or poll() with its bookkeeping

  Ledger* ledger_;
  LedgerTicket ticket_;
  Executor* executor_;
  std::shared_ptr<std::atomic<int>> unwaited_;
  std::atomic<Progress> progress_{Progress::queued};
  std::exception_ptr error_;
  Lane* lane_ = nullptr;
  std::shared_ptr<Work> previous_;  // null once it is over
};

class Executor {
 public:
  Executor() = default;
  /// Ends the thread; operations still queued are dropped.
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// What an operation must wait for before it starts.
  struct Order {
    Lane* lane = nullptr;            ///< null: no other of its kind (messages)
    std::shared_ptr<Work> previous;  ///< null: none
  };
  /// Appends an operation. `blocking`: the caller waits for it at once, so that the thread need not be woken.
  void submit(std::shared_ptr<Work> work, Order order, bool blocking);
  /// Returns when `work` is carried out. Takes the thread's part where that is idle.
  void wait(Work& work);
  /// Waits until all operations that are over have been released, so that what they use may go. False when
  /// that takes longer than `seconds`.
  bool release_finished(double seconds);

  /// Polls before giving the core away; 0 when ranks outnumber cores. Before the first operation.
  void set_spins(int spins) { spins_ = spins; }

 private:
  void loop();
  bool step();  // run_mutex_ held: one attempt at everything; true when anything moved
  bool admit();
  void retire(size_t index);
  bool sleep_until_rung(const Backoff& backoff);  // run_mutex_ held; false when nothing would ring
  void wake_if_needed();
  void ensure_thread();  // queue_mutex_ held

  std::mutex run_mutex_;                        // held while operations are carried out
  std::vector<std::shared_ptr<Work>> active_;   // in flight, or waiting for Order::previous
  std::deque<std::shared_ptr<Work>> behind_;    // waiting for their lane
  std::vector<std::shared_ptr<Work>> arrived_;  // kept for its memory
  std::atomic<int> active_count_{0};
  int spins_ = 60;

  std::mutex queue_mutex_;
  std::condition_variable wake_;
  std::vector<std::shared_ptr<Work>> queue_;
  std::atomic<bool> queued_{false};  // queue_ has some
  Bell* rung_ = nullptr;             // what a thread sleeps on with run_mutex_ held
  bool stop_ = false;
  std::thread thread_;
  std::atomic<int> waiters_{0};
};

}  // namespace nrl::comm
