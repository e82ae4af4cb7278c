#pragma once
// Device times of ranges: timed events before and after their work in the stream. The host never waits;
// events are read once they have completed.
//
// Nothing is recorded on a stream under capture: a graph replays work, not host ranges. A step launched as a
// graph appears as the ranges around the launch; its parts are known from earlier steps.

#include <vector>

#include "core/device/runtime.h"
#include "core/trace/recording.h"

namespace nrl::trace {

/// From now on, while the mode is not off, every Range of the calling thread also times the work enqueued
/// on `stream` during its lifetime. One device per process; a second call replaces the first. Blocks until
/// the stream has reached this point, to relate the device's clock to the host's. `runtime` and `stream`
/// must live until detach_device().
void attach_device(device::Runtime& runtime, device::StreamHandle stream);
/// Collects completed ranges, discards the others and ends the timing. Callable from any thread.
void detach_device();

/// Times the work enqueued on `stream` between constructor and destructor, on any thread, while a device is
/// attached and the mode is not off: for streams other than the attached one. Host time is not counted.
class DeviceRange {
 public:
  DeviceRange(const char* name, device::StreamHandle stream, Kind kind = Kind::other);
  ~DeviceRange();
  DeviceRange(const DeviceRange&) = delete;
  DeviceRange& operator=(const DeviceRange&) = delete;

 private:
  int index_ = -1;
};

/// Reads and recycles the events of completed ranges. Does not block; call once per step, after the step's
/// results have been waited for. Returns the number of ranges still open or pending.
int collect_device();

/// Device time per name since start(), of collected ranges, largest first. Nested ranges count in both.
std::vector<Total> device_totals();
/// The same per name and innermost range around.
std::vector<Total> device_totals_by_parent();

/// The row of a window for the stream of attach_device(); other streams have "device stream 1" and so on.
inline constexpr const char* compute_row_name = "device stream 0";

namespace detail {
/// A range as the host knows it.
struct RangeFacts {
  const char* name;
  const char* parent = "";
  Tag tag = {};
  uint32_t call = no_call;
  Kind kind = Kind::other;
};
/// True when this thread has attached a stream, perhaps of a device that is detached by now.
bool attached_here();
/// Begins a range on the stream that this thread attached; -1 when there is none. Called by Range.
int begin_on_device(const RangeFacts& range);
void end_on_device(int index) noexcept;
void forget_device_ranges(bool keep_events);
/// Adds the events of collected ranges, and their rows.
void take_device_events(Window& window);
}  // namespace detail

}  // namespace nrl::trace
