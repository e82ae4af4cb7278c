#pragma once
// Named ranges of the work of this process. Totals per name feed reports (share of matrix products in a
// step); recorded events become a timeline that Perfetto opens. Under a profiler that reads NVTX the ranges
// appear there as well, in the domain "nrl-train". When nothing is enabled a range costs one load and one
// branch.
//
// On a GPU a range of host code says how long enqueueing took. With attach_device() a range brackets its
// work in the stream with timed events, too (device_timeline.h).

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/trace/recording.h"

namespace nrl::trace {

namespace detail {
struct Open {
  int64_t begin_ns = 0;
  unsigned bits = 0;
  int device = -1;  // index of the range in the device timeline
};
Open begin(const char* name, unsigned bits);
void finish(const char* name, const Open& open);
}  // namespace detail

/// From the constructor to the destructor, on one thread. `name` must be a string literal or come from
/// intern(): only the pointer is kept. Names of the training loop: forward_pass, loss_computation,
/// backward_pass, optimizer_step, epoch_<i>.
class Range {
 public:
  explicit Range(const char* name) : name_(name) {
    if (const unsigned bits = detail::enabled.load(std::memory_order_relaxed)) [[unlikely]]
      open_ = detail::begin(name, bits);
  }
  ~Range() {
    if (open_.bits) [[unlikely]]
      detail::finish(name_, open_);
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  const char* name_;
  detail::Open open_;
};

/// A text that lives as long as the program, for names that are made at run time ("epoch_3").
const char* intern(const std::string& name);

enum class Mode { off, totals, timeline };

/// Starts anew with nothing recorded. `timeline` keeps every range (and the totals).
void start(Mode mode);

/// NVTX ranges on or off. Without this call they are on where a tool has put itself into the process
/// (NVTX_INJECTION64_PATH, as Nsight Systems and Nsight Compute set it).
void emit_nvtx(bool on);

/// Host time per name since start(), largest first. Nested ranges count in both.
std::vector<Total> totals();

/// Writes what `timeline` recorded as Chrome trace events (https://ui.perfetto.dev opens it); `process` is
/// the rank. Ranges of the device have rows of their own, one per stream.
void write_chrome_trace(const std::string& path, int process);

}  // namespace nrl::trace
