#include "parallel/comm/executor.h"

#include <algorithm>
#include <chrono>
#include <climits>
#include <ctime>
#include <utility>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/base/error.h"
#include "core/base/status.h"
#include "core/base/threads.h"
#include "core/trace/trace.h"
#include "parallel/comm/background.h"

namespace nrl::comm {

namespace {

// The scheduler tends to place a woken rank on the waker's core, so that two ranks share it. With a core per
// rank, only long waits end by a wake-up; short ones end by a timed sleep.
constexpr int64_t short_wait_ns = 2'000'000;

constexpr auto background_look = std::chrono::milliseconds(1);
thread_local bool in_background = false;

}  // namespace

void wait_in_background() {
  in_background = true;
}

// std::atomic::wait works within one process only; ranks share this futex.
void Doorbell::ring() {
  rings.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, &rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Doorbell::sleep(uint32_t seen) {
  const timespec limit{1, 0};
  syscall(SYS_futex, &rings, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void Work::wait() {
  const int64_t begin = now_ns();
  if (unwaited_) unwaited_->fetch_sub(1, std::memory_order_relaxed);
  if (in_background) {
    while (executor_ && !completed()) std::this_thread::sleep_for(background_look);
  } else if (log_) {
    status::Page& page = status::page();
    page.wait_id.store(ticket_.id, std::memory_order_relaxed);
    page.wait_since.store(begin, std::memory_order_relaxed);
    // Within a range for messages between stages it is one of these.
    const bool message = trace::innermost_kind() == trace::Kind::message;
    const trace::Range range("wait", message ? trace::Kind::message : trace::Kind::wait);
    block();
    page.wait_since.store(0, std::memory_order_relaxed);
    const int64_t waited = now_ns() - begin;
    page.waited_ns.fetch_add(waited, std::memory_order_relaxed);
    log_->expose(ticket_, waited);
  } else {
    block();
  }
  if (error_) std::rethrow_exception(error_);
}

void Work::block() {
  if (executor_ && !completed()) executor_->wait(*this);
  NRL_CHECK(completed(), "waiting for an operation that no executor runs");
}

namespace {

class FinishedWork final : public Work {
 public:
  FinishedWork() : Work(nullptr, {}, nullptr, nullptr) { run_now(); }

 private:
  Advance start() override { return Advance::done; }
};

}  // namespace

const std::shared_ptr<Work>& finished_work() {
  static const std::shared_ptr<Work> work = std::make_shared<FinishedWork>();
  return work;
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
        if (!previous_->host_done()) return Advance::waiting;
        if (const std::exception_ptr error = std::exchange(previous_, nullptr)->error())
          std::rethrow_exception(error);
      }
      if (log_) log_->start(ticket_);
      progress_.store(Progress::running, std::memory_order_release);
      result = start();
      if (result == Advance::waiting) result = Advance::progressed;
    } else {
      result = poll();
    }
  } catch (...) {
    error_ = std::current_exception();
    result = Advance::done;
    failed = true;
  }
  if (result == Advance::done) {
    if (log_) log_->finish(ticket_, failed);
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
  blocking = blocking && !in_background;
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
  if (active_.size() != 1 || (spins_ > 0 && backoff.waited_ns() < short_wait_ns)) return false;
  const std::shared_ptr<Work> work = active_.front();
  Doorbell* doorbell = work->doorbell();
  if (!doorbell) return false;
  const uint32_t seen = doorbell->rings.load(std::memory_order_acquire);
  doorbell->sleeping.store(1, std::memory_order_seq_cst);
  bool stop = false;
  {
    const std::lock_guard lock(queue_mutex_);
    rung_ = doorbell;
    stop = stop_;
  }
  // Events before the lines above are seen by this step; later ones ring.
  if (!step() && !stop) doorbell->sleep(seen);
  {
    const std::lock_guard lock(queue_mutex_);
    rung_ = nullptr;
  }
  doorbell->sleeping.store(0, std::memory_order_relaxed);
  return true;
}

void Executor::wait(Work& work) {
  waiters_.fetch_add(1, std::memory_order_relaxed);
  while (!work.completed()) {
    if (run_mutex_.try_lock()) {
      const std::unique_lock run(run_mutex_, std::adopt_lock);
      Backoff backoff(nullptr, spins_);
      while (!work.completed()) {
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
  // Operations that other threads queued while this one held run_mutex_ go to the executor's thread.
  wake_if_needed();
}

bool Executor::release_finished(double seconds) {
  const int64_t limit = now_ns() + static_cast<int64_t>(seconds * 1e9);
  Backoff backoff(nullptr, spins_);
  while (!run_mutex_.try_lock()) {
    if (now_ns() > limit) return false;
    {
      const std::lock_guard lock(queue_mutex_);
      if (rung_) rung_->ring();  // a sleeping thread holds run_mutex_
    }
    backoff.pause();
  }
  run_mutex_.unlock();
  wake_if_needed();  // a thread that failed to get the lock may sleep with work pending
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
  trace::name_thread("communication");
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
    // Without the lock, so that a waiting thread can poll at its own rate.
    if (backoff.spin()) continue;
    {
      const std::lock_guard run(run_mutex_);
      if (sleep_until_rung(backoff)) continue;
    }
    backoff.sleep();
  }
}

}  // namespace nrl::comm
