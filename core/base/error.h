#pragma once
// Errors that end the program, with their exit codes.

#ifndef __CUDACC__  // nvcc cannot compile every version of fmt: no formatted messages in kernel files
#include <spdlog/fmt/fmt.h>
#endif

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace nrl {

/// Process exit codes (<sysexits.h> where one fits). All ranks of a run exit with the same one.
enum class Exit : int {
  ok = 0,
  usage = 64,        ///< the command line is wrong
  data = 65,         ///< an input file is malformed
  no_input = 66,     ///< an input file is missing or unreadable
  unavailable = 69,  ///< a required GPU, MPI or NCCL is missing
  internal = 70,     ///< a bug in nrl-train
  out_of_memory = 71,
  cannot_create = 73,
  io = 74,
  stopped = 75,  ///< stopped on request with a checkpoint saved: run the same command again
  config = 78,
  diverged = 79,
  peer_lost = 80,
  silent_corruption = 81,  ///< a rank has other bits than its replicas: hardware computed a wrong result
};

/// An error with its exit code. `what()` is the complete message: what failed, where, and how to fix it,
/// without a prefix such as "error:" and without a trailing newline.
class Error : public std::runtime_error {
 public:
  Error(Exit code, const std::string& text) : std::runtime_error(text), code_(code) {}
  Exit code() const noexcept { return code_; }

 private:
  Exit code_;
};

#ifdef __CUDACC__
[[noreturn]] inline void fail(Exit code, const char* text) {
  throw Error(code, text);
}
#else
/// Throws Error(code, formatted text).
template <class... Args>
[[noreturn]] void fail(Exit code, fmt::format_string<Args...> text, Args&&... args) {
  throw Error(code, fmt::format(text, std::forward<Args>(args)...));
}
#endif

namespace detail {
[[noreturn]] void check_failed(const char* condition, const char* file, int line, const std::string& text);
}

}  // namespace nrl

/// Checks an internal invariant (exit 70). The other arguments are a format string and its values.
#ifdef __CUDACC__
#define NRL_CHECK(condition, ...)                                      \
  do {                                                                 \
    if (!(condition)) [[unlikely]]                                     \
      ::nrl::detail::check_failed(#condition, __FILE__, __LINE__, ""); \
  } while (false)
#else
#define NRL_CHECK(condition, ...)                                                                 \
  do {                                                                                            \
    if (!(condition)) [[unlikely]]                                                                \
      ::nrl::detail::check_failed(#condition, __FILE__, __LINE__, ::fmt::format("" __VA_ARGS__)); \
  } while (false)
#endif
