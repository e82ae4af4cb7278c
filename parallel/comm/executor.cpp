#include "parallel/comm/executor.h"

#include "core/base/error.h"
#include "core/base/threads.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>
#include <utility>

namespace nrl::comm {

namespace {

// A rank that another one wakes tends to land on the core of that one, so that two ranks share a core. Where
// there is one for each, only long waits are ended by a wake-up, the others by the clock.
constexpr int64_t kShortWaitNs = 2'000'000;

}  // namespace

// The standard library's atomic waits know only this process.
void Bell::ring() {
  rings.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, &rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Bell::sleep(uint32_t seen) {
  const timespec limit{1, 0};
  syscall(SYS_futex, &rings, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void Work::wait() {
  const int64_t begin = now_ns();
  if (unwaited_) unwaited_->fetch_sub(1, std::memory_order_relaxed);
  block();
  if (ledger_) ledger_->expose(ticket_, now_ns() - begin);
  if (error_) std::rethrow_exception(error_);
}

void Work::block() {
  if (executor_ && !over()) executor_->wait(*this);
  NRL_CHECK(over(), "waiting for an operation that no executor carries out");
}

void Work::run_now() {
  Backoff backoff(nullptr, 60);
  while (advance() != Advance::done) backoff.pause();
}

Advance Work::advance() {
  Advance result = Advance::waiting;
  bool failed = false;
  try {
    if (progress_.load(std::memory_order_relaxed) == Progress::queued) {
      if (previous_) {
        if (!previous_->carried_out()) return Advance::waiting;
        if (const std::exception_ptr error = std::exchange(previous_, nullptr)->error())
          std::rethrow_exception(error);
      }
      if (ledger_) ledger_->start(ticket_);
      progress_.store(Progress::running, std::memory_order_release);
      result = start();
      if (result == Advance::waiting) result = Advance::moved;
    } else {
      result = poll();
    }
  } catch (...) {
    error_ = std::current_exception();
    result = Advance::done;
    failed = true;
  }
  if (result == Advance::done) {
    if (ledger_) ledger_->finish(ticket_, failed);
    progress_.store(failed ? Progress::failed : Progress::done, std::memory_order_release);
    progress_.notify_all();
  }
  return result;
}

Executor::~Executor() {
  {
    const std::lock_guard lock(queue_mutex_);
    stop_ = true;
    if (rung_) rung_->ring();
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Executor::submit(std::shared_ptr<Work> work, Order order, bool blocking) {
  work->lane_ = order.lane;
  work->previous_ = std::move(order.previous);
  {
    const std::lock_guard lock(queue_mutex_);
    queue_.push_back(std::move(work));
    queued_.store(true, std::memory_order_release);
    if (!blocking) ensure_thread();
    if (rung_) rung_->ring();
  }
  if (!blocking) wake_.notify_one();
}

void Executor::ensure_thread() {
  if (!thread_.joinable()) thread_ = start_thread([this] { loop(); });
}

bool Executor::admit() {
  if (!queued_.load(std::memory_order_acquire)) return false;
  {
    const std::lock_guard lock(queue_mutex_);
    arrived_.swap(queue_);
    queued_.store(false, std::memory_order_relaxed);
  }
  for (std::shared_ptr<Work>& work : arrived_) {
    Lane* lane = work->lane_;
    if (lane && lane->busy_) {
      behind_.push_back(std::move(work));
      continue;
    }
    if (lane) lane->busy_ = true;
    active_.push_back(std::move(work));
  }
  arrived_.clear();
  return true;
}

void Executor::retire(size_t index) {
  const std::shared_ptr<Work> work = std::move(active_[index]);
  active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(index));
  Lane* lane = work->lane_;
  if (!lane) return;
  const auto next = std::find_if(behind_.begin(), behind_.end(),
                                 [&](const std::shared_ptr<Work>& w) { return w->lane_ == lane; });
  lane->busy_ = next != behind_.end();
  if (!lane->busy_) return;
  active_.push_back(std::move(*next));
  behind_.erase(next);
}

bool Executor::step() {
  bool moved = admit();
  for (size_t i = 0; i < active_.size();) {
    const Advance result = active_[i]->advance();
    moved |= result != Advance::waiting;
    if (result == Advance::done) {
      retire(i);
    } else {
      ++i;
    }
  }
  active_count_.store(static_cast<int>(active_.size()), std::memory_order_relaxed);
  return moved;
}

bool Executor::sleep_until_rung(const Backoff& backoff) {
  if (active_.size() != 1 || (spins_ > 0 && backoff.waited_ns() < kShortWaitNs)) return false;
  const std::shared_ptr<Work> work = active_.front();
  Bell* bell = work->bell();
  if (!bell) return false;
  const uint32_t seen = bell->rings.load(std::memory_order_acquire);
  bell->sleeping.store(1, std::memory_order_seq_cst);
  bool stop = false;
  {
    const std::lock_guard lock(queue_mutex_);
    rung_ = bell;
    stop = stop_;
  }
  // What came before the lines above is seen now, what comes after them rings.
  if (!step() && !stop) bell->sleep(seen);
  {
    const std::lock_guard lock(queue_mutex_);
    rung_ = nullptr;
  }
  bell->sleeping.store(0, std::memory_order_relaxed);
  return true;
}

void Executor::wait(Work& work) {
  waiters_.fetch_add(1, std::memory_order_relaxed);
  while (!work.over()) {
    if (run_mutex_.try_lock()) {
      const std::unique_lock run(run_mutex_, std::adopt_lock);
      Backoff backoff(nullptr, spins_);
      while (!work.over()) {
        if (step()) {
          backoff.reset();
        } else if (!backoff.spin() && !sleep_until_rung(backoff)) {
          backoff.sleep();
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

bool Executor::release_finished(double seconds) {
  const int64_t limit = now_ns() + static_cast<int64_t>(seconds * 1e9);
  Backoff backoff(nullptr, spins_);
  while (!run_mutex_.try_lock()) {
    if (now_ns() > limit) return false;
    {
      const std::lock_guard lock(queue_mutex_);
      if (rung_) rung_->ring();  // a thread that sleeps holds it
    }
    backoff.pause();
  }
  run_mutex_.unlock();
  wake_if_needed();  // a thread that found the lock taken may have gone to sleep over its work
  return true;
}

void Executor::wake_if_needed() {
  bool needed = active_count_.load(std::memory_order_relaxed) > 0;
  {
    const std::lock_guard lock(queue_mutex_);
    needed |= !queue_.empty();
    if (needed) ensure_thread();
  }
  if (needed) wake_.notify_one();
}

void Executor::loop() {
  Backoff backoff(&waiters_, spins_);
  while (true) {
    {
      std::unique_lock lock(queue_mutex_);
      wake_.wait(lock, [this] {
        return stop_ || !queue_.empty() || active_count_.load(std::memory_order_relaxed) > 0;
      });
      if (stop_) return;
    }
    {
      const std::lock_guard run(run_mutex_);
      if (step()) {
        backoff.reset();
        continue;
      }
    }
    // Outside of the lock, so that a waiter can poll in its own rhythm.
    if (backoff.spin()) continue;
    {
      const std::lock_guard run(run_mutex_);
      if (sleep_until_rung(backoff)) continue;
    }
    backoff.sleep();
  }
}

}  // namespace nrl::comm
