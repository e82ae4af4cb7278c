#pragma once
// Polling with backoff: spin, yield, sleep.

#include <atomic>
#include <cstdint>

namespace nrl::comm {

/// Spins briefly, then yields the core for a while, then sleeps for a fraction of the time waited so far:
/// other threads get the core, and the wait ends late by at most that fraction. Sleeps sooner while no thread
/// waits for the result.
class Backoff {
 public:
  /// `waiters`: threads blocked on the result (null: the caller itself). `spins`: rounds before yielding.
  Backoff(const std::atomic<int>* waiters, int spins) : waiters_(waiters), spins_(spins) {}
  void pause() {
    if (!spin()) sleep();
  }
  /// The spinning and yielding part of pause(); false when it is time to sleep.
  bool spin();
  /// The sleeping part.
  void sleep() const;
  /// Time since spinning ended.
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

}  // namespace nrl::comm
