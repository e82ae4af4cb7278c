#include "core/trace/trace.h"

#include <algorithm>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "core/base/error.h"
#include "core/trace/device_timeline.h"
#include "core/trace/nvtx.h"
#include "core/trace/thread_log.h"

namespace nrl::trace {
namespace detail {

std::atomic<unsigned> enabled{nvtx_wanted() ? nvtx_bit : 0};
std::atomic<EventSpace*> event_space{nullptr};
std::atomic<uint32_t> window{0};

namespace {

/// Counts the calls of start(): totals of older ones are forgotten.
std::atomic<uint32_t> generation{1};

struct Recorder {
  std::mutex mutex;
  std::list<ThreadLog> logs;  // of threads that have ended, too
  std::unique_ptr<EventSpace> space;
  uint32_t windows = 0;
  int64_t window_begin = 0;
};

/// Never destroyed: threads may end after the static objects.
Recorder& recorder() {
  static Recorder& r = *new Recorder;
  return r;
}

/// Gives the log of a thread that ends to a later one.
struct LogOwner {
  ThreadLog* log = nullptr;
  ~LogOwner() {
    if (!log) return;
    const std::lock_guard lock(recorder().mutex);
    log->name.clear();
    log->tag = {};
    log->in_use = false;
    own_log = nullptr;
  }
};

thread_local LogOwner owner;

/// Ends the window that is open; threads write no events afterwards. Returns its space.
std::unique_ptr<EventSpace> close_window(Recorder& r) {
  window.store(0, std::memory_order_seq_cst);
  for (const ThreadLog& log : r.logs)
    while (log.writing.load(std::memory_order_seq_cst)) std::this_thread::yield();
  event_space.store(nullptr, std::memory_order_relaxed);
  return std::move(r.space);
}

void set_bit(unsigned bit, bool on) {
  if (on)
    enabled |= bit;
  else
    enabled &= ~bit;
}

}  // namespace

ThreadLog& make_log() {
  Recorder& r = recorder();
  const std::lock_guard lock(r.mutex);
  const auto idle = std::find_if(r.logs.begin(), r.logs.end(), [](const ThreadLog& l) { return !l.in_use; });
  if (idle != r.logs.end()) {
    idle->in_use = true;
    owner.log = &*idle;
  } else {
    owner.log = &r.logs.emplace_back();
    owner.log->row = static_cast<uint16_t>(r.logs.size() - 1);
    owner.log->open.reserve(64);
  }
  return *(own_log = owner.log);
}

Tag& tag() {
  return thread_log().tag;
}

Open begin(const char* name, Kind kind, uint32_t call, double payload, unsigned bits) {
  Open open;
  open.bits = bits;
  if (bits & nvtx_bit) nvtx_push(name, kind, payload);
  if (bits & (record_bit | nesting_bit)) {
    ThreadLog& log = thread_log();
    if (bits & record_bit && attached_here())
      open.device = begin_on_device({.name = name,
                                     .parent = log.open.empty() ? "" : log.open.back().name,
                                     .tag = log.tag,
                                     .call = call,
                                     .kind = kind});
    log.open.push_back({.name = name, .tag = log.tag, .call = call, .kind = kind});
    if (bits & record_bit) log.open.back().begin = now_ns();
  }
  return open;
}

void finish(const char* name, const Open& open) {
  if (open.bits & (record_bit | nesting_bit)) {
    ThreadLog& log = *own_log;
    if (open.bits & record_bit) {
      const int64_t end = now_ns();
      if (open.device >= 0) end_on_device(open.device);
      const OpenRange& range = log.open.back();
      log.totals.add(name, end - range.begin, generation.load(std::memory_order_relaxed));
      if (window.load(std::memory_order_relaxed))
        log.add({.name = name,
                 .begin = range.begin,
                 .end = end,
                 .tag = range.tag,
                 .call = range.call,
                 .row = log.row,
                 .kind = range.kind});
    }
    log.open.pop_back();
  }
  if (open.bits & nvtx_bit) nvtx_pop();
}

}  // namespace detail

const char* innermost(std::string_view but) {
  if (!detail::own_log) return "";
  const auto& open = detail::own_log->open;
  const auto at = std::find_if(open.rbegin(), open.rend(), [&](const auto& r) { return r.name != but; });
  return at == open.rend() ? "" : at->name;
}

Kind innermost_kind() {
  if (!detail::own_log || detail::own_log->open.empty()) return Kind::other;
  return detail::own_log->open.back().kind;
}

void track_nesting(bool on) {
  detail::set_bit(detail::nesting_bit, on);
}

const char* intern(const std::string& name) {
  static std::mutex mutex;
  static std::set<std::string> names;
  const std::lock_guard lock(mutex);
  return names.insert(name).first->c_str();
}

void name_thread(std::string name) {
  detail::ThreadLog& log = detail::thread_log();
  const std::lock_guard lock(detail::recorder().mutex);
  log.name = std::move(name);
}

void start(Mode mode, size_t events) {
  detail::Recorder& r = detail::recorder();
  detail::forget_device_ranges(mode == Mode::timeline);
  const std::lock_guard lock(r.mutex);
  detail::close_window(r).reset();
  detail::generation.fetch_add(1, std::memory_order_relaxed);
  detail::set_bit(detail::record_bit, mode != Mode::off);
  if (mode != Mode::timeline) return;
  r.space = std::make_unique<detail::EventSpace>(events);
  detail::event_space.store(r.space.get(), std::memory_order_relaxed);
  r.window_begin = detail::now_ns();
  detail::window.store(++r.windows, std::memory_order_seq_cst);
}

bool recording_window() {
  return detail::window.load(std::memory_order_relaxed) != 0;
}

bool seen() {
  return recording_window() || (detail::enabled.load(std::memory_order_relaxed) & detail::nvtx_bit) != 0;
}

Window take() {
  detail::Recorder& r = detail::recorder();
  const detail::ThreadLog& own = detail::thread_log();
  const std::lock_guard lock(r.mutex);
  Window out;
  if (!r.space) return out;
  const std::unique_ptr<detail::EventSpace> space = detail::close_window(r);
  out.begin = r.window_begin;
  out.end = detail::now_ns();
  out.dropped = space->dropped();
  space->read(out.events);
  for (const detail::OpenRange& range : own.open)
    if (range.begin > 0)
      out.events.push_back({range.name, range.begin, out.end, range.tag, range.call, own.row, range.kind});
  // Row 0 is the calling thread; others have one if they recorded something.
  constexpr uint16_t none = UINT16_MAX;
  std::vector<uint16_t> row_of(r.logs.size(), none);
  std::vector<const detail::ThreadLog*> logs(r.logs.size());
  for (const detail::ThreadLog& log : r.logs) logs[log.row] = &log;
  out.rows.push_back(own.name.empty() ? "main" : own.name);
  row_of[own.row] = 0;
  for (Event& e : out.events) {
    uint16_t& row = row_of[e.row];
    if (row == none) {
      row = static_cast<uint16_t>(out.rows.size());
      const std::string& name = logs[e.row]->name;
      out.rows.push_back(name.empty() ? fmt::format("thread {}", row) : name);
    }
    e.row = row;
  }
  detail::take_device_events(out);
  for (Event& e : out.events) {
    e.begin = std::max(e.begin, out.begin);
    e.end = std::max(e.end, e.begin);
  }
  // A range is logged when it ends: of two with equal times the outer one is the later one.
  std::reverse(out.events.begin(), out.events.end());
  std::stable_sort(out.events.begin(), out.events.end(), [](const Event& a, const Event& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end > b.end;
  });
  return out;
}

void emit_nvtx(bool on) {
  detail::set_bit(detail::nvtx_bit, on);
}

std::vector<Total> totals() {
  detail::Recorder& r = detail::recorder();
  const std::lock_guard lock(r.mutex);
  detail::ThreadTotals::Sums sums;
  for (const detail::ThreadLog& log : r.logs)
    log.totals.read(detail::generation.load(std::memory_order_relaxed), sums);
  std::vector<Total> result;
  for (auto& [name, total] : sums) result.push_back(std::move(total));
  std::sort(result.begin(), result.end(),
            [](const Total& a, const Total& b) { return a.seconds > b.seconds; });
  return result;
}

}  // namespace nrl::trace
