#pragma once
// Errors that end the program, and the exit code each of them leaves with.

#ifndef __CUDACC__  // nvcc's front end does not take every version of fmt: no formatted texts in kernel files
#include <spdlog/fmt/fmt.h>
#endif

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace nrl {

/// Process exit codes (<sysexits.h> where one fits). Every rank of a run leaves with the same one.
enum class Exit : int {
  ok = 0,
  usage = 64,        ///< the command line is wrong
  data = 65,         ///< an input file is malformed
  no_input = 66,     ///< an input file is missing or unreadable
  unavailable = 69,  ///< no GPU, MPI or NCCL where one is needed
  internal = 70,     ///< our bug
  out_of_memory = 71,
  cannot_create = 73,
  io = 74,
  stopped = 75,  ///< stopped on request with a checkpoint saved: run the same command again
  config = 78,
  diverged = 79,
  peer_lost = 80,
};

/// An error with the exit code it leads to. `what()` is the complete text a user reads: what was wrong,
/// where, and what to do about it; no prefix such as "error:" and no trailing newline.
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

/// Internal invariant: a failure is our bug (exit 70). The rest of the arguments is a format string and its
/// values.
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
