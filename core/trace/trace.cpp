#include "core/trace/trace.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "core/base/error.h"
#include "core/trace/device_timeline.h"
#include "core/trace/nvtx.h"

namespace nrl::trace {
namespace detail {

std::atomic<unsigned> enabled{nvtx_wanted() ? nvtx_bit : 0};

namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct HostEvent {
  const char* name;
  int64_t begin, end;
  size_t thread;
};

struct Recorder {
  std::mutex mutex;
  bool keep_events = false;
  std::map<std::string_view, Total> totals;
  std::vector<HostEvent> events;
};

Recorder& recorder() {
  static Recorder r;
  return r;
}

/// Names of the open ranges of this thread, the innermost last.
thread_local std::vector<const char*> open_ranges;

}  // namespace

Open begin(const char* name, unsigned bits) {
  Open open;
  open.bits = bits;
  if (bits & nvtx_bit) nvtx_push(name);
  if (bits & record_bit) {
    open.device = begin_on_device(name, innermost());
    open.begin_ns = now_ns();
  }
  if (bits & (record_bit | nesting_bit)) open_ranges.push_back(name);
  return open;
}

void finish(const char* name, const Open& open) {
  if (open.bits & (record_bit | nesting_bit)) open_ranges.pop_back();
  if (open.bits & record_bit) {
    const int64_t end = now_ns();
    if (open.device >= 0) end_on_device(open.device);
    Recorder& r = recorder();
    const std::lock_guard lock(r.mutex);
    Total& total = r.totals[name];
    ++total.count;
    total.seconds += static_cast<double>(end - open.begin_ns) * 1e-9;
    if (r.keep_events)
      r.events.push_back(
          {name, open.begin_ns, end, std::hash<std::thread::id>()(std::this_thread::get_id())});
  }
  if (open.bits & nvtx_bit) nvtx_pop();
}

}  // namespace detail

const char* innermost(std::string_view but) {
  const auto& open = detail::open_ranges;
  const auto at = std::find_if(open.rbegin(), open.rend(), [&](const char* name) { return name != but; });
  return at == open.rend() ? "" : *at;
}

void track_nesting(bool on) {
  if (on)
    detail::enabled |= detail::nesting_bit;
  else
    detail::enabled &= ~detail::nesting_bit;
}

const char* intern(const std::string& name) {
  static std::mutex mutex;
  static std::set<std::string> names;
  const std::lock_guard lock(mutex);
  return names.insert(name).first->c_str();
}

void start(Mode mode) {
  detail::Recorder& r = detail::recorder();
  detail::forget_device_ranges(mode == Mode::timeline);
  const std::lock_guard lock(r.mutex);
  r.totals.clear();
  r.events.clear();
  r.keep_events = mode == Mode::timeline;
  if (mode != Mode::off)
    detail::enabled |= detail::record_bit;
  else
    detail::enabled &= ~detail::record_bit;
}

void emit_nvtx(bool on) {
  if (on)
    detail::enabled |= detail::nvtx_bit;
  else
    detail::enabled &= ~detail::nvtx_bit;
}

std::vector<Total> totals() {
  detail::Recorder& r = detail::recorder();
  const std::lock_guard lock(r.mutex);
  std::vector<Total> result;
  for (const auto& [name, total] : r.totals)
    result.push_back({std::string(name), "", total.count, total.seconds});
  std::sort(result.begin(), result.end(),
            [](const Total& a, const Total& b) { return a.seconds > b.seconds; });
  return result;
}

void write_chrome_trace(const std::string& path, int process) {
  const std::vector<detail::DeviceEvent> device = detail::device_events();
  detail::Recorder& r = detail::recorder();
  const std::lock_guard lock(r.mutex);
  std::FILE* f = std::fopen(path.c_str(), "w");
  if (!f) fail(Exit::cannot_create, "the trace {} cannot be created: {}", path, std::strerror(errno));
  int64_t origin = INT64_MAX;
  for (const auto& e : r.events) origin = std::min(origin, e.begin);
  for (const auto& e : device) origin = std::min(origin, e.begin);
  std::fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n", f);
  bool first = true;
  const auto event = [&](const char* name, int64_t begin, int64_t end, int row) {
    std::fprintf(f, "%s{\"name\":\"%s\",\"ph\":\"X\",\"ts\":%.3f,\"dur\":%.3f,\"pid\":%d,\"tid\":%d}",
                 first ? "" : ",\n", name, static_cast<double>(begin - origin) * 1e-3,
                 static_cast<double>(end - begin) * 1e-3, process, row);
    first = false;
  };
  std::map<size_t, int> threads;
  for (const auto& e : r.events)
    event(e.name, e.begin, e.end,
          threads.try_emplace(e.thread, static_cast<int>(threads.size())).first->second);
  constexpr int device_rows = 1000;  // after the rows of threads
  std::set<int> rows;
  for (const auto& e : device) {
    event(e.name, e.begin, e.end, device_rows + e.row);
    rows.insert(e.row);
  }
  for (const int row : rows)
    std::fprintf(
        f,
        "%s{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"device stream "
        "%d\"}}",
        ",\n", process, device_rows + row, row);
  std::fputs("\n]}\n", f);
  const bool bad = std::ferror(f) != 0;
  if (std::fclose(f) != 0 || bad)
    fail(Exit::io, "writing the trace {} failed: {}", path, std::strerror(errno));
}

}  // namespace nrl::trace
