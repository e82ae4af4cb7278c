#pragma once
// Named ranges of the work of this process. Totals per name feed reports (share of matrix products in a
// step); recorded events become a timeline that Perfetto opens. When nothing is enabled a range costs one
// load and one branch.

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace nrl::trace {

namespace detail {
extern std::atomic<bool> enabled;
int64_t now_ns();
void finish(const char* name, int64_t begin_ns);
}  // namespace detail

/// From the constructor to the destructor. `name` must be a string literal: only the pointer is kept.
class Range {
 public:
  explicit Range(const char* name) : name_(name) {
    if (detail::enabled.load(std::memory_order_relaxed)) [[unlikely]]
      begin_ = detail::now_ns();
  }
  ~Range() {
    if (begin_) [[unlikely]]
      detail::finish(name_, begin_);
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  const char* name_;
  int64_t begin_ = 0;
};

enum class Mode { off, totals, timeline };

/// Starts anew with nothing recorded. `timeline` keeps every range (and the totals).
void start(Mode mode);

struct Total {
  std::string name;
  int64_t count = 0;
  double seconds = 0;
};
/// Time per name since start(), largest first. Nested ranges count in both.
std::vector<Total> totals();

/// Writes what `timeline` recorded as Chrome trace events (https://ui.perfetto.dev opens it); `process` is
/// the rank.
void write_chrome_trace(const std::string& path, int process);

}  // namespace nrl::trace
