#pragma once
// Named ranges of this process's work. Totals per name feed reports (share of GEMMs in a step); recorded
// events become a timeline for Perfetto. A profiler that reads NVTX shows the ranges in the domain
// "nrl-train". A disabled range costs one load and one branch.
//
// On a GPU a range of host code measures the time to enqueue. After attach_device() it also brackets its work
// in the stream with timed events (device_timeline.h).

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
  unsigned bits = 0;  // those that were enabled
  int device = -1;    // index of the range in the device timeline
};
Open begin(const char* name, unsigned bits);
void finish(const char* name, const Open& open);
}  // namespace detail

/// A range from constructor to destructor, on one thread. `name` must be a string literal or come from
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

/// The name of the innermost open range of this thread that was opened while recording or nesting was on and
/// is not called `but`; "" if there is none.
const char* innermost(std::string_view but = {});
/// Turns on innermost() for ranges opened from now on, without recording anything.
void track_nesting(bool on);

/// A copy of `name` that is never freed, for names made at run time ("epoch_3").
const char* intern(const std::string& name);

enum class Mode { off, totals, timeline };

/// Clears everything recorded and sets the mode. `timeline` keeps every range, and the totals.
void start(Mode mode);

/// Turns NVTX ranges on or off. Default: on when a tool is injected into the process (NVTX_INJECTION64_PATH,
/// set by Nsight Systems and Nsight Compute).
void emit_nvtx(bool on);

/// Host time per name since start(), largest first. Nested ranges count in both.
std::vector<Total> totals();

/// Writes the recorded timeline as Chrome trace events (for https://ui.perfetto.dev); `process` is the rank.
/// Device ranges have their own rows, one per stream.
void write_chrome_trace(const std::string& path, int process);

}  // namespace nrl::trace
