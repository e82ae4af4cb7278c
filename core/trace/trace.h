#pragma once
// Named ranges of this process's work. Totals per name feed reports (share of GEMMs in a step); the events of
// a window feed profiles and timelines. A profiler that reads NVTX shows the ranges in the domain
// "nrl-train". A disabled range costs one load and one branch.
//
// On a GPU a range of host code measures the time to enqueue. After attach_device() it also brackets its work
// in the stream with timed events (device_timeline.h).

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/trace/recording.h"

namespace nrl::trace {

namespace detail {
struct Open {
  unsigned bits = 0;  // those that were enabled
  int device = -1;    // index of the range in the device timeline
};
Open begin(const char* name, Kind kind, uint32_t call, double payload, unsigned bits);
void finish(const char* name, const Open& open);
Tag& tag();
}  // namespace detail

/// A range from constructor to destructor, on one thread; a thread's ranges end in the reverse order. `name`
/// must be a string literal or come from intern(): only the pointer is kept. Names of the training loop:
/// step_<i>, forward_pass, loss_computation, backward_pass, optimizer_step, epoch_<i>. `call`: index of its
/// ops::Cost in the window. `payload`: the FLOPs or bytes that NVTX shows; 0: none.
class Range {
 public:
  explicit Range(const char* name, Kind kind = Kind::other, uint32_t call = no_call, double payload = 0)
      : name_(name) {
    if (const unsigned bits = detail::enabled.load(std::memory_order_relaxed)) [[unlikely]]
      open_ = detail::begin(name, kind, call, payload, bits);
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

/// The tag of ranges that this thread opens.
inline Tag& tag() {
  return detail::tag();
}

/// Changes the tag of the thread for its life.
class TagScope {
 public:
  explicit TagScope(const Tag& tag) : before_(detail::tag()) { detail::tag() = tag; }
  ~TagScope() { detail::tag() = before_; }
  TagScope(const TagScope&) = delete;
  TagScope& operator=(const TagScope&) = delete;

 private:
  Tag before_;
};

/// The name of the innermost open range of this thread that was opened while recording or nesting was on and
/// is not called `but`; "" if there is none.
const char* innermost(std::string_view but = {});
/// Its kind; Kind::other if there is none.
Kind innermost_kind();
/// Turns on innermost() for ranges opened from now on, without recording anything.
void track_nesting(bool on);

/// A copy of `name` that is never freed, for names made at run time ("epoch_3").
const char* intern(const std::string& name);

/// Names this thread's row of the windows ("loader"). Rows of other threads are "thread 1" and so on.
void name_thread(std::string name);

enum class Mode { off, totals, timeline };

/// Events for which a timeline has space, if start() is not told.
inline constexpr size_t default_events = 1 << 16;

/// Clears everything recorded and sets the mode. `timeline` keeps every range, and the totals: a window is
/// open until take(), start() or the end of its space, `events` ranges of all threads together.
void start(Mode mode, size_t events = default_events);

/// True while a window is open.
bool recording_window();
/// True while someone sees single ranges: a window, or a tool that reads NVTX. Names made per step are only
/// worth their memory then.
bool seen();

/// The window since start(Mode::timeline), which ends now; totals go on. Ranges of the calling thread that
/// are still open end with the window, those that were open before it begin with it; ranges of other threads
/// that are still open are left out. Empty if no window is open. Work of a device must have been waited for
/// and collected (collect_device()), or its ranges are missing.
Window take();

/// Turns NVTX ranges on or off. Default: on when a tool is injected into the process (NVTX_INJECTION64_PATH,
/// set by Nsight Systems and Nsight Compute).
void emit_nvtx(bool on);

/// Host time per name since start(), largest first. Nested ranges count in both.
std::vector<Total> totals();

}  // namespace nrl::trace
