#pragma once
// How a thread waits for something that it can only poll.

#include <atomic>
#include <cstdint>

namespace nrl::comm {

/// Spins briefly, then yields the core for a while, then sleeps for a fraction of the time waited so far: a
/// core that somebody else needs is given away, and the wait ends at most that fraction late. Where no thread
/// waits for the outcome it sleeps sooner.
class Backoff {
 public:
  /// `waiters`: threads blocked on the outcome (null: the caller itself is). `spins`: rounds before yielding.
  Backoff(const std::atomic<int>* waiters, int spins) : waiters_(waiters), spins_(spins) {}
  void pause() {
    if (!spin()) sleep();
  }
  /// The part of pause() that keeps the core or yields it; false when it is time to sleep.
  bool spin();
  /// The other part.
  void sleep() const;
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

}  // namespace nrl::comm
