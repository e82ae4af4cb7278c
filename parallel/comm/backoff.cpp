#include "parallel/comm/backoff.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include <sched.h>
#include <sys/prctl.h>

#include "parallel/comm/collective_log.h"

namespace nrl::comm {

namespace {

// Longer than the skew between ranks within a step, shorter than a scheduler time slice.
constexpr int64_t yield_ns = 500'000;
constexpr int64_t unwanted_yield_ns = 20'000;  // no thread waits for the operation yet
constexpr int64_t shortest_sleep_ns = 20'000, longest_sleep_ns = 250'000;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace

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
  if (waited_ns_ > (wanted ? yield_ns : unwanted_yield_ns)) return false;
  sched_yield();
  return true;
}

void Backoff::sleep() const {
  // The kernel rounds sleeps up by 50 us unless the thread asks for less.
  thread_local const bool precise = prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL) == 0;
  (void)precise;
  std::this_thread::sleep_for(
      std::chrono::nanoseconds(std::clamp(waited_ns_ / 16, shortest_sleep_ns, longest_sleep_ns)));
}

}  // namespace nrl::comm
