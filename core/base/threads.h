#pragma once
// Starting threads, and the error when the system refuses one.

#include <cstdint>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

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

/// Starts a thread. Fails like fail_thread_refused() when the system refuses it.
template <class F>
std::thread start_thread(F&& body) {
  try {
    return std::thread(std::forward<F>(body));
  } catch (const std::system_error&) {
    fail_thread_refused();
  }
}

}  // namespace nrl
