#pragma once
// Starting threads, and what to say when the system refuses one.

#include <cstdint>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "core/base/error.h"

namespace nrl {

/// Limits on the number of processes and threads.
struct ThreadLimits {
  std::optional<int64_t> user;    ///< RLIMIT_NPROC, soft: of all processes of this user together
  std::optional<int64_t> cgroup;  ///< pids.max nearest to being reached, of this process's control groups
  std::optional<int64_t> cgroup_current;  ///< pids.current beside it
  std::string cgroup_path;                ///< the directory of both
  std::optional<int64_t> system;          ///< kernel.threads-max
};

/// Reads the limits; absent where there is none. `root` stands for "/" in tests.
ThreadLimits read_thread_limits(const std::string& root = "");

/// Names the limit that a refused thread has run into, its value and what to do.
std::string describe_thread_refusal(const ThreadLimits& limits);

/// Exit::out_of_memory with that text.
[[noreturn]] void fail_thread_refused();

/// The error that an exception stands for: an Error is itself, memory and threads refused by the system are
/// Exit::out_of_memory, anything else is our bug.
Error error_from(const std::exception& e);

/// Starts a thread. Fails as fail_thread_refused() where the system has no more.
template <class F>
std::thread start_thread(F&& body) {
  try {
    return std::thread(std::forward<F>(body));
  } catch (const std::system_error&) {
    fail_thread_refused();
  }
}

}  // namespace nrl
