// The calls of a simulated device: copies, memory, streams, events, graphs.

#include <algorithm>
#include <cstring>
#include <tuple>

#include "core/base/error.h"
#include "tests/sim/device.h"
#include "tests/sim/engine/sanitizers.h"

namespace nrl::sim {

using device::CopyKind;
using device::EventHandle;
using device::EventKind;
using device::GraphHandle;
using device::Priority;
using device::StreamHandle;

void Device::copy(void* to, const void* from, size_t bytes, CopyKind kind, StreamHandle handle) {
  Lock lock = enter("copy");
  Stream& stream = stream_of(handle, "copy");
  if (bytes == 0) return;
  const bool to_host = kind == CopyKind::device_to_host, from_host = kind == CopyKind::host_to_device;
  for (const auto& [p, host, what] :
       {std::tuple<const void*, bool, const char*>{to, to_host, "to"}, {from, from_host, "from"}})
    if (memory_.contains(p, host ? 1 : bytes) == host)
      fail(Exit::internal, "simulated device: copy of {} bytes {} {}", bytes, what,
           host ? "device memory where host memory must be" : "memory that is no block of this device");
  const void* host = to_host ? to : from_host ? from : nullptr;
  const bool pageable = host && !pinned_.contains(host, bytes);
  if (pageable && stream.capture) {
    break_capture(stream.capture, "a copy of pageable memory was captured");
    fail(Exit::internal, "simulated device: a copy of pageable memory cannot be captured");
  }
  std::vector<Reach::Range> ranges;
  if (!to_host) ranges.push_back({to, bytes});
  if (!from_host) ranges.push_back({from, bytes});
  const Reach reach = Reach::only(std::move(ranges));
  if (!pageable || to_host) {
    push_work(
        lock, stream, [=] { std::memcpy(to, from, bytes); }, reach);
    if (!pageable) return;
    const auto end = mark(lock, stream);
    advance_until(lock, [&] { return end->done; });
    sanitizer::acquire(end.get());
    return;
  }
  const auto* first = static_cast<const std::byte*>(from);
  push_work(
      lock, stream,
      [to, staged = std::vector<std::byte>(first, first + bytes)] {
        std::memcpy(to, staged.data(), staged.size());
      },
      reach);
}

void Device::copy_rows(void* to, int64_t to_pitch, const void* from, int64_t from_pitch, size_t bytes,
                       int64_t rows, StreamHandle handle) {
  constexpr int64_t max_pitch = INT32_MAX;  // cudaDevAttrMaxPitch
  for (const int64_t pitch : {to_pitch, from_pitch})
    if (pitch < static_cast<int64_t>(bytes) || pitch > max_pitch)
      fail(Exit::internal, "simulated device: copy_rows of {} bytes with a pitch of {}", bytes, pitch);
  Runtime::copy_rows(to, to_pitch, from, from_pitch, bytes, rows, handle);
}

void Device::fill(void* p, uint8_t value, size_t bytes, StreamHandle handle) {
  Lock lock = enter("fill");
  Stream& stream = stream_of(handle, "fill");
  if (bytes == 0) return;
  if (!memory_.contains(p, bytes))
    fail(Exit::internal, "simulated device: fill of {} bytes that are no block of this device", bytes);
  push_work(
      lock, stream, [=] { std::memset(p, value, bytes); }, Reach::only({{p, bytes}}));
}

void Device::call_host(void (*function)(void*), void* argument, StreamHandle handle) {
  Lock lock = enter("call_host");
  push_work(
      lock, stream_of(handle, "call_host"), [=] { function(argument); }, Reach::only({}));
}

// --- memory --------------------------------------------------------------------------------------

void* Device::allocate(size_t bytes) {
  Lock lock = enter("allocate");
  check_bound("allocate");
  no_capture_here("allocate");
  if (const size_t free = options_.memory - memory_.used(); bytes > free)
    fail(Exit::out_of_memory, "the device has {} bytes free, {} are needed", free, bytes);
  return memory_.allocate(bytes);
}

void* Device::allocate_pinned(size_t bytes) {
  Lock lock = enter("allocate_pinned");
  check_bound("allocate_pinned");
  no_capture_here("allocate_pinned");
  return std::memset(pinned_.allocate(bytes), 0, bytes);
}

// As cudaFree and cudaFreeHost: after everything in flight.
void Device::release(void* p) noexcept {
  Lock lock = enter_last("release");
  for (const auto& c : captures_)
    if (c->thread == std::this_thread::get_id()) break_capture(c, "memory was released");
  drain(lock);
  if (!memory_.release(p)) die("release of memory that is not allocated");
}

void Device::release_pinned(void* p) noexcept {
  Lock lock = enter_last("release_pinned");
  for (const auto& c : captures_)
    if (c->thread == std::this_thread::get_id()) break_capture(c, "pinned memory was released");
  drain(lock);
  if (!pinned_.release(p)) die("release of pinned memory that is not allocated");
}

size_t Device::free_memory() {
  Lock lock = enter("free_memory");
  return options_.memory - memory_.used();
}

// --- streams and events --------------------------------------------------------------------------

StreamHandle Device::create_stream(Priority) {
  Lock lock = enter("create_stream");
  check_bound("create_stream");
  auto stream = std::make_unique<Stream>();
  stream->number = ++streams_made_;
  Stream* handle = stream.get();
  streams_.push_back(std::move(stream));
  const std::lock_guard names(registry().mutex);
  registry().owner[handle] = this;
  return handle;
}

void Device::destroy_stream(StreamHandle handle) noexcept {
  Lock lock = enter_last("destroy_stream");
  const auto it = std::find_if(streams_.begin(), streams_.end(),
                               [&](const auto& s) { return s.get() == handle && !s->destroyed; });
  if (it == streams_.end()) die("destroy_stream: no stream of this device, or one that was destroyed before");
  if ((*it)->capture) break_capture((*it)->capture, "a stream of it was destroyed");
  (*it)->destroyed = true;  // what is enqueued still runs
  const std::lock_guard names(registry().mutex);
  registry().owner.erase(handle);
}

void Device::synchronize(StreamHandle handle) {
  Lock lock = enter("synchronize");
  Stream& stream = stream_of(handle, "synchronize");
  if (stream.capture) {
    break_capture(stream.capture, "a stream of it was synchronized");
    fail(Exit::internal, "simulated device: synchronize of a stream that is being captured");
  }
  no_capture_here("synchronize");
  const auto end = mark(lock, stream);
  advance_until(lock, [&] { return end->done; });
  sanitizer::acquire(end.get());
}

void Device::synchronize() {
  Lock lock = enter("synchronize");
  for (const auto& c : captures_) break_capture(c, "the device was synchronized");
  if (!captures_.empty())
    fail(Exit::internal, "simulated device: synchronize while a graph is being captured");
  advance_until(lock, [&] { return waiting_ == 0; });
  for (const auto& s : streams_) sanitizer::acquire(s.get());
}

EventHandle Device::create_event(EventKind kind) {
  Lock lock = enter("create_event");
  check_bound("create_event");
  auto event = std::make_unique<EventState>();
  event->kind = kind;
  EventState* handle = event.get();
  events_.emplace(handle, std::move(event));
  return handle;
}

void Device::destroy_event(EventHandle handle) noexcept {
  Lock lock = enter_last("destroy_event");
  if (events_.erase(handle) == 0) die("destroy_event: no event of this device, or one destroyed before");
}

void Device::record(EventHandle handle, StreamHandle stream_handle) {
  Lock lock = enter("record");
  EventState& event = event_of(handle, "record");
  Stream& stream = stream_of(stream_handle, "record");
  event.capture = stream.capture;
  event.after = stream.tail;
  event.last = stream.capture ? nullptr : mark(lock, stream);
}

void Device::wait(StreamHandle stream_handle, EventHandle handle) {
  Lock lock = enter("wait");
  Stream& stream = stream_of(stream_handle, "wait");
  const EventState& event = event_of(handle, "wait");
  if (event.capture) {
    if (!event.capture->active)
      fail(Exit::internal, "simulated device: wait for an event that was last recorded in a capture");
    if (stream.capture && stream.capture != event.capture)
      fail(Exit::internal, "simulated device: two captures wait for each other");
    if (!stream.capture) stream.tail.clear();
    stream.capture = event.capture;
    merge(stream.tail, event.after);
    return;
  }
  if (!event.last) return;
  if (stream.capture) {
    break_capture(stream.capture, "a stream of it waited for an event from outside");
    fail(Exit::internal,
         "simulated device: a stream that is being captured waits for an event from outside the capture");
  }
  Item item;
  item.kind = Item::Kind::wait;
  item.point = event.last;
  push(lock, stream, std::move(item));
}

bool Device::done(EventHandle handle) {
  Lock lock = enter("done");
  const EventState& event = event_of(handle, "done");
  if (event.capture)
    fail(Exit::internal, "simulated device: the state of an event that was last recorded in a capture");
  const std::shared_ptr<Point> point = event.last;
  if (!point) return true;
  // A device makes progress while the host polls.
  for (uint64_t n = random_() % 16; n > 0 && !point->done && !busy_ && !error_; --n) {
    if (!step(lock)) break;
    for (const auto& s : streams_) settle(*s);
  }
  raise();
  if (point->done) sanitizer::acquire(point.get());
  return point->done;
}

void Device::synchronize_event(EventHandle handle) {
  Lock lock = enter("synchronize_event");
  const EventState& event = event_of(handle, "synchronize_event");
  if (event.capture)
    fail(Exit::internal, "simulated device: waiting for an event that was last recorded in a capture");
  no_capture_here("synchronize_event");
  const std::shared_ptr<Point> point = event.last;
  if (!point) return;
  advance_until(lock, [&] { return point->done; });
  sanitizer::acquire(point.get());
}

double Device::elapsed_ms(EventHandle begin, EventHandle end) {
  Lock lock = enter("elapsed_ms");
  const EventState &a = event_of(begin, "elapsed_ms"), &b = event_of(end, "elapsed_ms");
  if (a.kind != EventKind::timed || b.kind != EventKind::timed || !a.last || !b.last || !a.last->done ||
      !b.last->done)
    fail(Exit::internal,
         "simulated device: time between events that are not timed, not recorded or not done");
  return b.last->time_ms - a.last->time_ms;
}

// --- graphs --------------------------------------------------------------------------------------

void Device::no_capture_here(const char* call) {
  for (const auto& c : captures_) {
    if (c->thread != std::this_thread::get_id()) continue;
    break_capture(c, fmt::format("{} was called", call));
    fail(Exit::internal, "simulated device: {} while this thread captures a graph", call);
  }
}

void Device::break_capture(const std::shared_ptr<Capture>& capture, const std::string& why) {
  if (capture->broken.empty()) capture->broken = why;
}

void Device::begin_capture(StreamHandle handle) {
  Lock lock = enter("begin_capture");
  Stream& stream = stream_of(handle, "begin_capture");
  if (stream.capture)
    fail(Exit::internal, "simulated device: begin_capture of a stream that is being captured");
  stream.capture = std::make_shared<Capture>();
  stream.capture->thread = std::this_thread::get_id();
  stream.capture->origin = &stream;
  stream.tail.clear();
  captures_.push_back(stream.capture);
}

bool Device::capturing(StreamHandle handle) {
  Lock lock = enter("capturing");
  return stream_of(handle, "capturing").capture != nullptr;
}

GraphHandle Device::end_capture(StreamHandle handle) {
  Lock lock = enter("end_capture");
  Stream& stream = stream_of(handle, "end_capture");
  const std::shared_ptr<Capture> capture = stream.capture;
  if (!capture || capture->origin != &stream)
    fail(Exit::internal, "simulated device: end_capture of a stream where no capture began");
  if (capture->thread != std::this_thread::get_id())
    fail(Exit::internal, "simulated device: end_capture by another thread than began it");
  const bool joined = capture->joined(stream.tail);
  leave_capture(capture);
  if (!capture->broken.empty())
    fail(Exit::internal, "simulated device: the capture is invalid: {}", capture->broken);
  if (!joined)
    fail(Exit::internal, "simulated device: work was captured on a stream that was not joined back");
  graphs_.emplace(capture->graph.get(), capture->graph);
  return capture->graph.get();
}

void Device::discard_capture(StreamHandle handle) noexcept {
  Lock lock = enter_last("discard_capture");
  for (const auto& c : captures_)
    if (c->origin == handle && c->thread == std::this_thread::get_id()) return leave_capture(c);
  die("discard_capture of a stream where this thread began no capture");
}

/// Ends a capture on all of its streams. `capture` may be an element of captures_.
void Device::leave_capture(const std::shared_ptr<Capture>& capture) {
  const std::shared_ptr<Capture> ended = capture;
  for (const auto& s : streams_) {
    if (s->capture != ended) continue;
    s->capture = nullptr;
    s->tail.clear();
  }
  ended->active = false;
  std::erase(captures_, ended);
}

void Device::launch(GraphHandle handle, StreamHandle stream_handle) {
  Lock lock = enter("launch");
  check_bound("launch");
  Stream& stream = stream_of(stream_handle, "launch");
  const auto it = graphs_.find(handle);
  if (it == graphs_.end()) fail(Exit::internal, "simulated device: launch of no graph, or of one destroyed");
  if (stream.capture)
    fail(Exit::internal, "simulated device: launch of a graph while another is being captured");
  const std::shared_ptr<Graph> graph = it->second;
  if (graph->last) {
    Item item;
    item.kind = Item::Kind::wait;
    item.point = graph->last;
    push(lock, stream, std::move(item));
  }
  Item item;
  item.kind = Item::Kind::graph;
  item.replay = std::make_unique<Replay>(graph);
  push(lock, stream, std::move(item));
  graph->last = mark(lock, stream);
}

void Device::destroy_graph(GraphHandle handle) noexcept {
  Lock lock = enter_last("destroy_graph");
  if (graphs_.erase(handle) == 0) die("destroy_graph: no graph of this device, or one destroyed before");
}

}  // namespace nrl::sim
