#pragma once
// Runs queued communication: in the thread that waits for it, or in its own thread while the others compute.
//
// Order rule. Collectives of a group run one after another, in the order they were issued, which must be the
// same on all of its ranks. Collectives of different groups and messages do not wait for each other: while an
// operation is blocked, the executor makes progress on all others in flight. An operation issued After
// another one starts when that one has completed. Only nccl is stricter (world/make_device.h).

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "parallel/comm/backoff.h"
#include "parallel/comm/collective_log.h"
#include "parallel/comm/task.h"

namespace nrl::comm {

class Executor;

/// A futex in shared memory that wakes a sleeping rank of the same host.
struct Doorbell {
  std::atomic<uint32_t> rings;
  std::atomic<uint32_t> sleeping;  ///< nonzero: the owner may sleep until the next ring

  /// Called by the owner's peers after a sequentially consistent write that it may be waiting for.
  void ring_sleeper() {
    if (sleeping.load(std::memory_order_seq_cst) > 0) ring();
  }
  void ring();
  /// Sleeps until `rings` differs from `seen`, at most a second.
  void sleep(uint32_t seen);
};

/// Operations of one lane run one after another: the collectives of a group. The operations must keep it
/// alive: the executor may still use it shortly after wait() has returned.
class Lane {
  friend class Executor;
  bool busy_ = false;
};

/// One operation in flight. Subclasses implement it.
class Work {
 public:
  /// `log` may be null (not logged); `executor` null: the operation is run by run_now().
  Work(CollectiveLog* log, const LogTicket& ticket, Executor* executor,
       std::shared_ptr<std::atomic<int>> unwaited)
      : log_(log), ticket_(ticket), executor_(executor), unwaited_(std::move(unwaited)) {}
  virtual ~Work() = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  /// True when the result is available.
  virtual bool finished() const { return completed(); }
  /// True when the host's part is done: a dependent operation may start, on a device in a stream that
  /// order_stream() made wait.
  virtual bool host_done() const { return completed(); }
  /// Makes a device stream (device::StreamHandle) wait for the result. host_done() must be true.
  virtual void order_stream(void* stream) const { (void)stream; }
  /// The executor that runs the operation; null when it runs as it is issued.
  virtual Executor* executor() const { return executor_; }
  /// The error it failed with, once it has completed.
  virtual std::exception_ptr error() const { return completed() ? error_ : nullptr; }

  /// Blocks until finished; runs the operation in this thread if the executor's thread is idle. Rethrows its
  /// error. Must be called exactly once.
  void wait();
  /// Starts and finishes the operation in the calling thread, outside of any executor.
  void run_now();

 protected:
  /// Called once, by the executor.
  virtual Advance start() = 0;
  /// Called until it returns done.
  virtual Advance poll() { return Advance::done; }
  /// Rung when the operation may proceed, valid until then; null when it must be polled.
  virtual Doorbell* doorbell() { return nullptr; }

  /// Blocks until completed; a subclass may wait for more.
  virtual void block();
  /// True when the executor is done with it, successfully or not.
  bool completed() const { return progress_.load(std::memory_order_acquire) >= Progress::done; }
  bool failed() const { return progress_.load(std::memory_order_acquire) == Progress::failed; }

 private:
  friend class Executor;
  Advance advance();  // start() or poll() with its bookkeeping

  CollectiveLog* log_;
  LogTicket ticket_;
  Executor* executor_;
  std::shared_ptr<std::atomic<int>> unwaited_;
  std::atomic<Progress> progress_{Progress::queued};
  std::exception_ptr error_;
  Lane* lane_ = nullptr;
  std::shared_ptr<Work> previous_;  // null once it has completed
};

/// An operation that has finished. May be waited for any number of times.
const std::shared_ptr<Work>& finished_work();

class Executor {
 public:
  Executor() = default;
  /// Ends the thread; operations still queued are dropped.
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// Dependencies of an operation.
  struct Order {
    Lane* lane = nullptr;            ///< null: unordered (messages)
    std::shared_ptr<Work> previous;  ///< null: none
  };
  /// Appends an operation. `blocking`: the caller waits for it immediately, so the thread is not woken.
  void submit(std::shared_ptr<Work> work, Order order, bool blocking);
  /// Returns when `work` has completed. If the executor's thread is idle, the caller runs the operations.
  void wait(Work& work);
  /// Waits until all completed operations have been released, so that their resources may be destroyed. False
  /// after `seconds`.
  bool release_finished(double seconds);

  /// Polls before yielding the core; 0 when ranks outnumber cores. Must be set before the first operation.
  void set_spins(int spins) { spins_ = spins; }

 private:
  void loop();
  bool step();  // run_mutex_ held: polls every operation once; true on any progress
  bool admit();
  void retire(size_t index);
  bool sleep_until_rung(const Backoff& backoff);  // run_mutex_ held; false without a doorbell
  void wake_if_needed();
  void ensure_thread();  // queue_mutex_ held

  std::mutex run_mutex_;                        // held while operations run
  std::vector<std::shared_ptr<Work>> active_;   // in flight, or waiting for Order::previous
  std::deque<std::shared_ptr<Work>> behind_;    // waiting for their lane
  std::vector<std::shared_ptr<Work>> arrived_;  // kept for its memory
  std::atomic<int> active_count_{0};
  int spins_ = 60;

  std::mutex queue_mutex_;
  std::condition_variable wake_;
  std::vector<std::shared_ptr<Work>> queue_;
  std::atomic<bool> queued_{false};  // queue_ is not empty
  Doorbell* rung_ = nullptr;         // a thread sleeps on it with run_mutex_ held
  bool stop_ = false;
  std::thread thread_;
  std::atomic<int> waiters_{0};
};

}  // namespace nrl::comm
