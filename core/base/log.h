#pragma once
// The log of rank 0 is standard output; warnings and errors go to standard error, prefixed with
// the rank. Texts may quote untrusted input: control characters are escaped and long lines cut
// here (message_text(), text.h).

#include <string_view>
#include <utility>

#include <spdlog/fmt/fmt.h>

namespace nrl::log {

/// Called once after the rank is known. Ranks other than 0 print nothing but warnings and errors, prefixed
/// "[rank N] ". `world_size` 1 prints no prefix.
void init(int rank, int world_size);

/// A line of the run's log (rank 0 only).
void line(std::string_view text);
/// "warn: text" on standard error.
void warn_text(std::string_view text);
/// "error: text" on standard error.
void error_text(std::string_view text);

template <class... Args>
void info(fmt::format_string<Args...> text, Args&&... args) {
  line(fmt::format(text, std::forward<Args>(args)...));
}
template <class... Args>
void warn(fmt::format_string<Args...> text, Args&&... args) {
  warn_text(fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace nrl::log
