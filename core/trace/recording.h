#pragma once
// Shared by the host and device timelines: what a recorded range is, whether ranges are recorded, and their
// totals.

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace nrl::trace {

namespace detail {
inline constexpr unsigned record_bit = 1, nvtx_bit = 2, nesting_bit = 4;
extern std::atomic<unsigned> enabled;  // the bits above
}  // namespace detail

struct Total {
  std::string name;
  std::string parent;  ///< name of the innermost range around; empty where totals are by name alone
  int64_t count = 0;
  double seconds = 0;
};

/// The kind of work of a range: the categories of NVTX and the colors of the page.
enum class Kind : uint8_t {
  step,           ///< a whole optimizer step: "step_3"
  phase,          ///< forward_pass, loss_computation, backward_pass, optimizer_step, epoch_1
  layer,          ///< a visit of a layer
  op,             ///< a call of core/ops; its cost has the index Event::call
  recompute,      ///< a layer's steps that are computed again
  communication,  ///< issuing a collective
  wait,           ///< blocked until a collective has ended
  message,        ///< blocked in a send or receive between pipeline stages
  copy,           ///< blocked until copies of offloaded memory have ended
  data,           ///< waiting for the loader
  report,         ///< the program's own output and statistics
  other,
};

/// Where in a step a range lies; -1: in none.
struct Tag {
  int32_t step = 0;  ///< from 1; 0: between steps
  int32_t microbatch = -1;
  int32_t tick = -1;  ///< of the memory plan (memory/plan.h)
  int16_t chunk = -1;
  int16_t layer = -1;
  bool operator==(const Tag&) const = default;
};

inline constexpr uint32_t no_call = UINT32_MAX;

/// A range that has ended. Times are nanoseconds of the steady clock; not relative to an origin, so that
/// times of several processes on one machine can be laid over each other.
struct Event {
  const char* name;
  int64_t begin, end;
  Tag tag;
  uint32_t call = no_call;  ///< index of its ops::Cost in the list of the window
  uint16_t row = 0;         ///< index for Window::rows: a thread, or a stream of the device
  Kind kind = Kind::other;
};

/// The ranges recorded between start(Mode::timeline) and take().
struct Window {
  std::vector<Event> events;  ///< by begin; at equal begins the longer one first
  std::vector<std::string>
      rows;                    ///< "main", "communication", "device stream 1", ...; 0 is the thread of take()
  int64_t begin = 0, end = 0;  ///< of the window, nanoseconds as in Event
  int64_t dropped = 0;         ///< ranges for which there was no space
};

}  // namespace nrl::trace
