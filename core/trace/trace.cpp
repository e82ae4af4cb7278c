#include "core/trace/trace.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "core/base/error.h"

namespace nrl::trace {
namespace detail {

std::atomic<bool> enabled{false};

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

namespace {

struct Event {
  const char* name;
  int64_t begin, end;
  size_t thread;
};

struct Recorder {
  std::mutex mutex;
  bool keep_events = false;
  std::map<std::string_view, Total> totals;
  std::vector<Event> events;
};

Recorder& recorder() {
  static Recorder r;
  return r;
}

}  // namespace

void finish(const char* name, int64_t begin) {
  const int64_t end = now_ns();
  Recorder& r = recorder();
  const std::lock_guard lock(r.mutex);
  Total& total = r.totals[name];
  ++total.count;
  total.seconds += static_cast<double>(end - begin) * 1e-9;
  if (r.keep_events)
    r.events.push_back({name, begin, end, std::hash<std::thread::id>()(std::this_thread::get_id())});
}

}  // namespace detail

void start(Mode mode) {
  detail::Recorder& r = detail::recorder();
  const std::lock_guard lock(r.mutex);
  r.totals.clear();
  r.events.clear();
  r.keep_events = mode == Mode::timeline;
  detail::enabled.store(mode != Mode::off, std::memory_order_relaxed);
}

std::vector<Total> totals() {
  detail::Recorder& r = detail::recorder();
  const std::lock_guard lock(r.mutex);
  std::vector<Total> result;
  for (const auto& [name, total] : r.totals)
    result.push_back({std::string(name), total.count, total.seconds});
  std::sort(result.begin(), result.end(),
            [](const Total& a, const Total& b) { return a.seconds > b.seconds; });
  return result;
}

void write_chrome_trace(const std::string& path, int process) {
  detail::Recorder& r = detail::recorder();
  const std::lock_guard lock(r.mutex);
  std::FILE* f = std::fopen(path.c_str(), "w");
  if (!f) fail(Exit::cannot_create, "cannot write the trace {}: {}", path, std::strerror(errno));
  const int64_t origin = r.events.empty() ? 0 : r.events.front().begin;
  std::map<size_t, int> threads;
  std::fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n", f);
  bool first = true;
  for (const auto& e : r.events) {
    const int thread = threads.try_emplace(e.thread, static_cast<int>(threads.size())).first->second;
    std::fprintf(f, "%s{\"name\":\"%s\",\"ph\":\"X\",\"ts\":%.3f,\"dur\":%.3f,\"pid\":%d,\"tid\":%d}",
                 first ? "" : ",\n", e.name, static_cast<double>(e.begin - origin) * 1e-3,
                 static_cast<double>(e.end - e.begin) * 1e-3, process, thread);
    first = false;
  }
  std::fputs("\n]}\n", f);
  const bool bad = std::ferror(f) != 0;
  if (std::fclose(f) != 0 || bad)
    fail(Exit::io, "writing the trace {} failed: {}", path, std::strerror(errno));
}

}  // namespace nrl::trace
