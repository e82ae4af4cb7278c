#include "core/trace/device_timeline.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>

#include "core/base/error.h"
#include "core/trace/thread_log.h"

namespace nrl::trace {
namespace {

using device::EventKind;

/// A range between its two events. Indices count from the attachment: they stay valid when
/// older ranges are collected.
struct Timed {
  detail::RangeFacts facts = {nullptr};
  uint16_t row = 0;
  device::StreamHandle stream = nullptr;
  device::Event begin, end;
  bool closed = false, read = false;
};

/// A device event and its host time; relates the two clocks.
struct Anchor {
  device::Event event;
  int64_t ns = 0;
};

struct Timeline {
  std::mutex mutex;
  device::Runtime* runtime = nullptr;
  device::StreamHandle stream = nullptr;
  uint64_t attachment = 0;
  std::deque<Timed> ranges;
  int first = 0;  // index of ranges.front()
  std::vector<device::Event> spare;
  std::vector<device::StreamHandle> rows;
  Anchor anchor;
  std::map<std::pair<std::string_view, std::string_view>, Total> totals;  // by name and parent
  bool keep_events = false;
  std::vector<Event> events;  // with rows of the device
};

Timeline& timeline() {
  static Timeline t;
  return t;
}

/// The attachment that this thread made.
thread_local uint64_t own_attachment = 0;

device::Event take_event(Timeline& t) {
  if (t.spare.empty()) return device::Event(*t.runtime, EventKind::timed);
  device::Event event = std::move(t.spare.back());
  t.spare.pop_back();
  return event;
}

int collect_locked(Timeline& t);

int begin_locked(Timeline& t, const detail::RangeFacts& facts, device::StreamHandle stream) {
  if (t.runtime->capturing(stream)) return -1;
  constexpr size_t many = 8192;  // bounds the list when collect_device() is not called
  if (t.ranges.size() % many == many - 1) collect_locked(t);
  auto row = std::find(t.rows.begin(), t.rows.end(), stream);
  if (row == t.rows.end()) row = t.rows.insert(t.rows.end(), stream);
  Timed range;
  range.facts = facts;
  range.row = static_cast<uint16_t>(row - t.rows.begin());
  range.stream = stream;
  range.begin = take_event(t);
  range.begin.record(stream);
  t.ranges.push_back(std::move(range));
  return t.first + static_cast<int>(t.ranges.size()) - 1;
}

void end_locked(Timeline& t, int index) {
  // Ranges that outlive a detach_device() or a start() are forgotten.
  if (index < t.first || index >= t.first + static_cast<int>(t.ranges.size())) return;
  Timed& range = t.ranges[index - t.first];
  if (t.runtime->capturing(range.stream)) {  // a capture began inside: discard the range
    range.closed = range.read = true;
    return;
  }
  range.end = take_event(t);
  range.end.record(range.stream);
  range.closed = true;
}

void read(Timeline& t, Timed& range) {
  const double ms = t.runtime->elapsed_ms(range.begin.get(), range.end.get());
  Total& total = t.totals[{range.facts.name, range.facts.parent}];
  ++total.count;
  total.seconds += ms * 1e-3;
  range.read = true;
  if (!t.keep_events) return;
  const double after = t.runtime->elapsed_ms(t.anchor.event.get(), range.begin.get());
  const int64_t begin = t.anchor.ns + static_cast<int64_t>(after * 1e6);
  const detail::RangeFacts& f = range.facts;
  t.events.push_back(
      {f.name, begin, begin + static_cast<int64_t>(ms * 1e6), f.tag, f.call, range.row, f.kind});
}

int collect_locked(Timeline& t) {
  int open = 0;
  for (Timed& range : t.ranges) {
    if (range.read) continue;
    // Events complete in order within a stream only: query all.
    if (range.closed && range.end.done())
      read(t, range);
    else
      ++open;
  }
  while (!t.ranges.empty() && t.ranges.front().read) {
    Timed& range = t.ranges.front();
    // Event times are float milliseconds: move the anchor along, or long runs would lose precision.
    constexpr double far_ms = 1000;
    if (range.end.get() && t.runtime->elapsed_ms(t.anchor.event.get(), range.begin.get()) > far_ms) {
      t.anchor.ns +=
          static_cast<int64_t>(t.runtime->elapsed_ms(t.anchor.event.get(), range.begin.get()) * 1e6);
      std::swap(t.anchor.event, range.begin);
    }
    t.spare.push_back(std::move(range.begin));
    if (range.end.get()) t.spare.push_back(std::move(range.end));
    t.ranges.pop_front();
    ++t.first;
  }
  return open;
}

void forget_locked(Timeline& t) {
  t.first += static_cast<int>(t.ranges.size());
  for (Timed& range : t.ranges) {
    t.spare.push_back(std::move(range.begin));
    if (range.end.get()) t.spare.push_back(std::move(range.end));
  }
  t.ranges.clear();
}

void detach_locked(Timeline& t) {
  if (!t.runtime) return;
  forget_locked(t);
  t.spare.clear();
  t.rows.clear();
  t.anchor = {};
  t.runtime = nullptr;
  t.stream = nullptr;
}

void sort_by_time(std::vector<Total>& totals) {
  std::sort(totals.begin(), totals.end(),
            [](const Total& a, const Total& b) { return a.seconds > b.seconds; });
}

bool recording() {
  return (detail::enabled.load(std::memory_order_relaxed) & detail::record_bit) != 0;
}

}  // namespace

void attach_device(device::Runtime& runtime, device::StreamHandle stream) {
  Timeline& t = timeline();
  const std::lock_guard lock(t.mutex);
  detach_locked(t);
  t.runtime = &runtime;
  t.stream = stream;
  own_attachment = ++t.attachment;
  t.rows.push_back(stream);  // row 0: compute_row_name
  t.anchor.event = device::Event(runtime, EventKind::timed);
  t.anchor.event.record(stream);
  t.anchor.event.synchronize();
  t.anchor.ns = std::chrono::duration_cast<std::chrono::nanoseconds>(
                    std::chrono::steady_clock::now().time_since_epoch())
                    .count();
}

void detach_device() {
  Timeline& t = timeline();
  const std::lock_guard lock(t.mutex);
  if (t.runtime) collect_locked(t);
  detach_locked(t);
}

DeviceRange::DeviceRange(const char* name, device::StreamHandle stream, Kind kind) {
  if (!recording()) return;
  Timeline& t = timeline();
  const std::lock_guard lock(t.mutex);
  if (t.runtime)
    index_ = begin_locked(t, {.name = name, .tag = detail::thread_log().tag, .kind = kind}, stream);
}

DeviceRange::~DeviceRange() {
  if (index_ >= 0) detail::end_on_device(index_);
}

int collect_device() {
  Timeline& t = timeline();
  const std::lock_guard lock(t.mutex);
  return t.runtime ? collect_locked(t) : 0;
}

std::vector<Total> device_totals() {
  std::map<std::string, Total> by_name;
  for (const Total& part : device_totals_by_parent()) {
    Total& total = by_name[part.name];
    total.name = part.name;
    total.count += part.count;
    total.seconds += part.seconds;
  }
  std::vector<Total> result;
  for (const auto& [name, total] : by_name) result.push_back(total);
  sort_by_time(result);
  return result;
}

std::vector<Total> device_totals_by_parent() {
  Timeline& t = timeline();
  const std::lock_guard lock(t.mutex);
  std::vector<Total> result;
  for (const auto& [key, total] : t.totals)
    result.push_back({std::string(key.first), std::string(key.second), total.count, total.seconds});
  sort_by_time(result);
  return result;
}

namespace detail {

bool attached_here() {
  return own_attachment != 0;
}

int begin_on_device(const RangeFacts& range) {
  if (own_attachment == 0) return -1;
  Timeline& t = timeline();
  const std::lock_guard lock(t.mutex);
  if (!t.runtime || t.attachment != own_attachment) return -1;
  return begin_locked(t, range, t.stream);
}

void end_on_device(int index) noexcept {
  Timeline& t = timeline();
  const std::lock_guard lock(t.mutex);
  if (!t.runtime) return;
  try {
    end_locked(t, index);
  } catch (const std::exception&) {  // the device has failed; every other call reports it
  }
}

void forget_device_ranges(bool keep_events) {
  Timeline& t = timeline();
  const std::lock_guard lock(t.mutex);
  if (t.runtime) forget_locked(t);
  t.keep_events = keep_events;
  t.totals.clear();
  t.events.clear();
}

void take_device_events(Window& window) {
  Timeline& t = timeline();
  const std::lock_guard lock(t.mutex);
  const auto first = static_cast<uint16_t>(window.rows.size());
  for (Event& e : t.events) {
    e.row = static_cast<uint16_t>(e.row + first);
    window.events.push_back(e);
  }
  t.events.clear();
  t.keep_events = false;
  for (size_t row = 0; row < t.rows.size(); ++row)
    window.rows.push_back(fmt::format("device stream {}", row));
}

}  // namespace detail
}  // namespace nrl::trace
