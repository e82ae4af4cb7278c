#pragma once
// When ranges run on a device: timed events before and after their work in the stream. The host never waits;
// the events are read once they are done.
//
// Nothing is recorded on a stream under capture: a graph replays work, not host ranges. A step that is
// launched as a graph shows as the ranges around the launch; its parts are known from the steps before it.

#include <vector>

#include "core/device/runtime.h"
#include "core/trace/recording.h"

namespace nrl::trace {

/// From now on, while the mode is not off, every Range of the calling thread also times the work that is
/// enqueued on `stream` while it lives. One device per process; a second call takes its place. Blocks until
/// the stream has reached this point, to relate the device's clock to the host's. Both must outlive the
/// detach_device().
void attach_device(device::Runtime& runtime, device::StreamHandle stream);
/// Reads what is done, forgets the rest and ends the timing; any thread.
void detach_device();

/// Times the work enqueued on `stream` between constructor and destructor, on any thread, while a device is
/// attached and the mode is not off: for streams other than the attached one. The host's time is not counted.
class DeviceRange {
 public:
  DeviceRange(const char* name, device::StreamHandle stream);
  ~DeviceRange();
  DeviceRange(const DeviceRange&) = delete;
  DeviceRange& operator=(const DeviceRange&) = delete;

 private:
  int index_ = -1;
};

/// Reads the events of the ranges that are done, and uses them again; call once per step, where the step's
/// results have been waited for anyway. Does not wait. Returns the number of ranges still open or
/// not done.
int collect_device();

/// Device time per name since start(), of collected ranges, largest first. Nested ranges count in both.
std::vector<Total> device_totals();

namespace detail {
/// Of the attached stream if this thread attached it; -1: nothing is timed. Called by Range.
int begin_on_device(const char* name);
void end_on_device(int index) noexcept;
void forget_device_ranges(bool keep_events);

struct DeviceEvent {
  const char* name;
  int64_t begin, end;  // ns, the host's clock
  int row;             // stream
};
std::vector<DeviceEvent> device_events();
}  // namespace detail

}  // namespace nrl::trace
