#pragma once
// The state of this process, for readers outside of its work: a watchdog, and the flight file of a process
// that was killed (parallel/comm/flight.h).

#include <array>
#include <atomic>
#include <cstdint>
#include <string_view>

namespace nrl::status {

enum class Phase : uint8_t {
  starting,   ///< until the first step
  computing,  ///< the work of steps
  data,       ///< reading the data of a step, or generating it
  evaluation,
  checkpoint,
  between,    ///< reports, and everything else between steps
  finishing,  ///< after the last step
};
inline constexpr int phases = 7;

/// "starting", "computing", "data", ...; "unknown" for a number that is no phase.
std::string_view name_of(Phase phase);

/// All fields may be read at any time, by other processes too if the page lies in shared memory; together
/// they are no snapshot. Times are nanoseconds of the steady clock.
struct Page {
  std::atomic<uint64_t> progress{0};  ///< grows with every step of a program and every operation that ends
  std::atomic<int64_t> step{0};       ///< the step in progress, or the last one; 0: none yet
  std::atomic<int64_t> completed{0};  ///< the last step whose result is known
  std::atomic<int64_t> phase_since{0};
  std::atomic<int64_t> wait_since{0};  ///< of the wait in progress; 0: the thread of the steps does not wait
  std::atomic<uint64_t> wait_id{0};    ///< LogEntry::id (parallel/comm/collective_log.h) of its operation
  std::atomic<Phase> phase{Phase::starting};
  std::atomic<int32_t> microbatch{-1};  ///< of the step of a program in progress; -1: of none
  std::atomic<int32_t> layer{-1};       ///< index in the list of layers
  std::atomic<int64_t> waited_ns{0};    ///< sum of the waits for other ranks that have ended
  std::atomic<bool> backward{false};    ///< the pass through that layer
  /// By phase: time without such waits, until the phase was last left.
  std::array<std::atomic<int64_t>, phases> own_ns{};
  /// The signal that ends the process (core/base/fatal_signals.h); 0: none.
  std::atomic<int32_t> signal{0};
  std::atomic<int32_t> signal_sent{0};  ///< 1: by a process; 0: by the kernel, because of an instruction
  std::atomic<uint64_t> signal_at{0};   ///< the sender, 0: this process; or the address that it is about
};
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free &&
              std::atomic<int64_t>::is_always_lock_free && std::atomic<int32_t>::is_always_lock_free &&
              std::atomic<Phase>::is_always_lock_free);

namespace detail {
extern std::atomic<Page*> current;
}

/// The page of this process.
inline Page& page() {
  return *detail::current.load(std::memory_order_relaxed);
}

/// Continues the page in other memory, which must stay valid while any thread works; null: in memory of this
/// module. Counts of threads that work meanwhile may be lost.
void place(Page* at);

inline void made_progress() {
  page().progress.fetch_add(1, std::memory_order_relaxed);
}

/// By the thread of the steps.
void enter(Phase phase);

}  // namespace nrl::status
