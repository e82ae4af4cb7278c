#pragma once
// Starting threads, and the error when the system refuses one.

#include <cstdint>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include <signal.h>

#include "core/base/error.h"

namespace nrl {

/// Most threads of a rank.
inline constexpr int max_threads = 4096;

/// Limits on the number of processes and threads.
struct ThreadLimits {
  std::optional<int64_t> user;            ///< RLIMIT_NPROC (soft), over all processes of this user
  std::optional<int64_t> cgroup;          ///< pids.max of the control group with the least headroom
  std::optional<int64_t> cgroup_current;  ///< its pids.current
  std::string cgroup_path;                ///< its directory
  std::optional<int64_t> system;          ///< kernel.threads-max
  std::optional<int64_t> address_space;   ///< RLIMIT_AS (soft), bytes
  int64_t address_space_used = 0;         ///< bytes that the process has mapped
  int64_t stack = 0;                      ///< bytes that a new thread maps for its stack
};

/// Reads the limits; nullopt where there is none. `root` replaces "/" in tests.
ThreadLimits read_thread_limits(const std::string& root = "");

/// The message for a refused thread: the limit it has reached, its value and the fix.
std::string describe_thread_limit(const ThreadLimits& limits);

/// Exit::out_of_memory with that text.
[[noreturn]] void fail_thread_refused();

/// Converts an exception: an Error stays as it is, memory and threads refused by the system become
/// Exit::out_of_memory, anything else Exit::internal.
Error error_from(const std::exception& e);

/// Blocks all signals of the calling thread for its lifetime.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

/// Starts a thread. Fails like fail_thread_refused() when the system refuses it.
template <class F>
std::thread start_thread(F&& body) {
  try {
    return std::thread(std::forward<F>(body));
  } catch (const std::system_error&) {
    fail_thread_refused();
  }
}

/// The same for a thread to which no signal is delivered.
template <class F>
std::thread start_thread_without_signals(F&& body) {
  const BlockedSignals blocked;  // the thread inherits the mask
  return start_thread(std::forward<F>(body));
}

}  // namespace nrl
