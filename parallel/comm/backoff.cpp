#include "parallel/comm/backoff.h"

#include "parallel/comm/collective_log.h"

#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace nrl::comm {

namespace {

// Longer than the skew between ranks within a step, shorter than a scheduler time slice.
constexpr int64_t kYieldNs = 500'000;
constexpr int64_t kUnwantedYieldNs = 20'000;  // no thread waits for the operation yet
constexpr int64_t kShortestSleepNs = 20'000, kLongestSleepNs = 250'000;

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
  if (waited_ns_ > (wanted ? kYieldNs : kUnwantedYieldNs)) return false;
  sched_yield();
  return true;
}

void Backoff::sleep() const {
  // The kernel rounds sleeps up by 50 us unless the thread asks for less.
  thread_local const bool precise = prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL) == 0;
  (void)precise;
  std::this_thread::sleep_for(
      std::chrono::nanoseconds(std::clamp(waited_ns_ / 16, kShortestSleepNs, kLongestSleepNs)));
}

}  // namespace nrl::comm
