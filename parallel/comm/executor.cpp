#include "parallel/comm/executor.h"

#include "core/base/error.h"
#include "core/base/threads.h"

#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>

namespace nrl::comm {

namespace {

thread_local const std::atomic<int>* t_waiters = nullptr;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

// Longer than the differences between ranks in a step's waits, shorter than a slice of the scheduler.
constexpr int64_t kYieldNs = 500'000;
constexpr int64_t kUnwantedYieldNs = 20'000;  // nobody waits for the outcome yet
constexpr int64_t kShortestSleepNs = 20'000, kLongestSleepNs = 250'000;

void precise_sleep(int64_t ns) {
  // The kernel rounds sleeps up by 50 us unless the thread asks for less.
  thread_local const bool precise = prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL) == 0;
  (void)precise;
  std::this_thread::sleep_for(std::chrono::nanoseconds(ns));
}

}  // namespace

void Work::wait() {
  const int64_t begin = now_ns();
  if (unwaited_) unwaited_->fetch_sub(1, std::memory_order_relaxed);
  block();
  if (ledger_) ledger_->expose(ticket_, now_ns() - begin);
  if (error_) std::rethrow_exception(error_);
}

void Work::block() {
  if (executor_ && !over()) executor_->wait(*this);
  NRL_CHECK(over(), "waiting for an operation that nobody carries out");
}

void Work::run_now() {
  if (advance(true)) return;
  Backoff backoff(nullptr, 60);
  while (!advance(false)) backoff.pause();
}

bool Work::advance(bool first) {
  bool over = false;
  bool failed = false;
  try {
    if (first) {
      if (ledger_) ledger_->start(ticket_);
      progress_.store(Progress::running, std::memory_order_release);
      over = start();
    } else {
      over = poll();
    }
  } catch (...) {
    error_ = std::current_exception();
    over = failed = true;
  }
  if (over) {
    if (ledger_) ledger_->finish(ticket_, failed);
    progress_.store(failed ? Progress::failed : Progress::done, std::memory_order_release);
    progress_.notify_all();
  }
  return over;
}

bool Backoff::spin() {
  const bool wanted = waiters_ == nullptr || waiters_->load(std::memory_order_relaxed) > 0;
  if (rounds_ < (wanted ? spins_ : std::min(spins_, 20))) {
    ++rounds_;
    relax();
    return true;
  }
  const int64_t now = now_ns();
  if (begin_ns_ == 0) begin_ns_ = now;
  waited_ns_ = now - begin_ns_;
  if (waited_ns_ > (wanted ? kYieldNs : kUnwantedYieldNs)) return false;
  sched_yield();
  return true;
}

void Backoff::pause() {
  if (spin()) return;
  precise_sleep(std::clamp(waited_ns_ / 16, kShortestSleepNs, kLongestSleepNs));
}

Executor::~Executor() {
  {
    std::lock_guard lock(queue_mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

const std::atomic<int>* Executor::current_waiters() {
  return t_waiters;
}

void Executor::submit(std::shared_ptr<Work> work, bool blocking) {
  {
    std::lock_guard lock(queue_mutex_);
    queue_.push_back(std::move(work));
    if (!blocking) ensure_thread();
  }
  if (!blocking) wake_.notify_one();
}

void Executor::ensure_thread() {
  if (!thread_.joinable()) thread_ = start_thread([this] { loop(); });
}

bool Executor::step() {
  bool progress = false;
  for (size_t i = 0; i < active_.size();) {
    if (active_[i]->advance(false)) {
      active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(i));
      progress = true;
    } else {
      ++i;
    }
  }
  std::shared_ptr<Work> next;
  {
    std::lock_guard lock(queue_mutex_);
    if (!queue_.empty()) {
      next = std::move(queue_.front());
      queue_.pop_front();
    }
  }
  if (next) {
    if (!next->advance(true)) active_.push_back(std::move(next));
    progress = true;
  }
  active_count_.store(static_cast<int>(active_.size()), std::memory_order_relaxed);
  return progress;
}

void Executor::wait(Work& work) {
  waiters_.fetch_add(1, std::memory_order_relaxed);
  while (!work.over()) {
    if (run_mutex_.try_lock()) {
      std::unique_lock run(run_mutex_, std::adopt_lock);
      Backoff backoff(nullptr, 60);
      while (!work.over()) {
        if (step()) {
          backoff.reset();
        } else {
          backoff.pause();
        }
      }
    } else {
      const Progress seen = work.progress_.load(std::memory_order_acquire);
      if (seen < Progress::done) work.progress_.wait(seen, std::memory_order_acquire);
    }
  }
  waiters_.fetch_sub(1, std::memory_order_relaxed);
  // What others queued while this thread held run_mutex_ falls to the executor's thread.
  wake_if_needed();
}

bool Executor::let_go(double seconds) {
  const int64_t limit = now_ns() + static_cast<int64_t>(seconds * 1e9);
  Backoff backoff(nullptr, 60);
  while (!run_mutex_.try_lock()) {
    if (now_ns() > limit) return false;
    backoff.pause();
  }
  run_mutex_.unlock();
  return true;
}

void Executor::wake_if_needed() {
  bool needed = active_count_.load(std::memory_order_relaxed) > 0;
  {
    std::lock_guard lock(queue_mutex_);
    needed |= !queue_.empty();
    if (needed) ensure_thread();
  }
  if (needed) wake_.notify_one();
}

void Executor::loop() {
  t_waiters = &waiters_;
  Backoff backoff(&waiters_, 60);
  while (true) {
    {
      std::unique_lock lock(queue_mutex_);
      wake_.wait(lock, [this] {
        return stop_ || !queue_.empty() || active_count_.load(std::memory_order_relaxed) > 0;
      });
      if (stop_) return;
    }
    bool progress = false;
    {
      std::lock_guard run(run_mutex_);
      progress = step();
    }
    // Paused outside of the lock, so that a waiter can poll in its own rhythm.
    if (progress) {
      backoff.reset();
    } else {
      backoff.pause();
    }
  }
}

}  // namespace nrl::comm
