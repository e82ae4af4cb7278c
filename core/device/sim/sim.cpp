#include "core/device/sim/sim.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <vector>

#include "core/base/error.h"

namespace nrl::device {
namespace {

using Closure = std::function<void()>;

// Recorded work: closures and what each must come after.
struct SimGraph {
  struct Node {
    Closure run;
    std::set<int> after;
  };
  std::vector<Node> nodes;
};

struct SimEvent {
  EventKind kind = EventKind::order;
  uint64_t recorded = 0, done = 0;  // numbers of record() calls
  double time_ms = 0;               // of the last one done
  bool captured = false;            // the last record() was recorded into a graph
  std::set<int> after;              // its nodes
};

struct SimStream;

class Sim final : public Runtime {
 public:
  explicit Sim(const SimOptions& options) : options_(options), random_(options.seed) {
    properties_.name = "simulated";
    properties_.major = 9;
    properties_.multiprocessors = options.multiprocessors;
    properties_.memory = options.memory;
    properties_.shared_memory_optin = 227 * 1024;
    properties_.l2_cache = size_t{1} << 20;
    properties_.uuid = "simulated";
    properties_.simulated = true;
  }
  ~Sim() override;

  void bind_thread() override {}
  void* allocate(size_t bytes) override;
  void release(void* p) noexcept override;
  void* allocate_pinned(size_t bytes) override;
  void release_pinned(void* p) noexcept override;
  size_t free_memory() override {
    const std::lock_guard lock(mutex_);
    return options_.memory - used_;
  }
  StreamHandle create_stream(Priority) override;
  void destroy_stream(StreamHandle stream) noexcept override;
  void synchronize(StreamHandle stream) override;
  void synchronize() override;
  EventHandle create_event(EventKind kind) override;
  void destroy_event(EventHandle event) noexcept override;
  void record(EventHandle event, StreamHandle stream) override;
  void wait(StreamHandle stream, EventHandle event) override;
  bool done(EventHandle event) override;
  void synchronize_event(EventHandle event) override;
  double elapsed_ms(EventHandle begin, EventHandle end) override;
  void copy(void* to, const void* from, size_t bytes, CopyKind kind, StreamHandle stream) override;
  void fill(void* p, uint8_t value, size_t bytes, StreamHandle stream) override;
  void call_host(void (*function)(void*), void* argument, StreamHandle stream) override;
  void begin_capture(StreamHandle stream) override;
  GraphHandle end_capture(StreamHandle stream) override;
  void launch(GraphHandle graph, StreamHandle stream) override;
  void destroy_graph(GraphHandle graph) noexcept override;

  /// Work of a stream, in its order.
  void enqueue(SimStream* stream, Closure work);

 private:
  SimStream* checked(StreamHandle stream);
  SimEvent* checked_event(EventHandle event);
  void raise() const {  // mutex held
    if (error_) std::rethrow_exception(error_);
  }
  bool advance();  // one piece of work; false when none can run
  template <class Done>
  void advance_until(const Done& done, const char* what);
  void not_while_capturing(const char* call) const;
  bool is_pinned(const void* p) const;
  void replay(const SimGraph& graph);

  SimOptions options_;
  // Recursive: kernels of one stream run while another call holds it.
  mutable std::recursive_mutex mutex_;
  std::mt19937_64 random_;
  std::vector<SimStream*> streams_;
  std::set<SimEvent*> events_;
  std::set<SimGraph*> graphs_;
  std::map<char*, size_t> device_, pinned_;
  size_t used_ = 0;
  std::exception_ptr error_;  // sticky, as a CUDA error is
  SimGraph* capture_ = nullptr;
  SimStream* origin_ = nullptr;
};

// One entry of a queue: work, or waiting for an event's record() number `wanted`.
struct Entry {
  Closure run;
  SimEvent* event = nullptr;
  uint64_t wanted = 0;
};

struct SimStream {
  Sim* owner;
  std::deque<Entry> queue;
  bool capturing = false;
  std::set<int> after;  // nodes that the next recorded piece of work comes after
};

constexpr size_t longest_queue = 4096;

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Sim::~Sim() {
  if (streams_.empty() && events_.empty() && graphs_.empty() && device_.empty() && pinned_.empty()) return;
  if (std::uncaught_exceptions() > 0 || error_) return;
  std::fprintf(
      stderr,
      "simulated device: %zu streams, %zu events, %zu graphs, %zu blocks of device and %zu of pinned "
      "memory were not released\n",
      streams_.size(), events_.size(), graphs_.size(), device_.size(), pinned_.size());
  std::abort();
}

void* Sim::allocate(size_t bytes) {
  const std::lock_guard lock(mutex_);
  raise();
  not_while_capturing("allocate");
  if (bytes > options_.memory - used_)
    fail(Exit::out_of_memory, "the device has {} bytes free, {} are needed", options_.memory - used_, bytes);
  const size_t rounded = (bytes + 255) / 256 * 256;
  auto* p = static_cast<char*>(std::aligned_alloc(256, rounded == 0 ? 256 : rounded));
  if (!p) throw std::bad_alloc();
  std::memset(p, 0xFF, rounded);  // NaN in every float format
  device_[p] = bytes;
  used_ += bytes;
  return p;
}

void Sim::release(void* p) noexcept {
  const std::lock_guard lock(mutex_);
  const auto it = device_.find(static_cast<char*>(p));
  if (it == device_.end()) {
    std::fprintf(stderr, "simulated device: release of memory that is not allocated\n");
    std::abort();
  }
  // As cudaFree: after everything under way.
  while (!error_ && advance()) {
  }
  used_ -= it->second;
  device_.erase(it);
  std::free(p);
}

void* Sim::allocate_pinned(size_t bytes) {
  const std::lock_guard lock(mutex_);
  raise();
  const size_t rounded = (bytes + 255) / 256 * 256;
  auto* p = static_cast<char*>(std::aligned_alloc(256, rounded == 0 ? 256 : rounded));
  if (!p) throw std::bad_alloc();
  pinned_[p] = bytes;
  return p;
}

void Sim::release_pinned(void* p) noexcept {
  const std::lock_guard lock(mutex_);
  while (!error_ && advance()) {
  }
  pinned_.erase(static_cast<char*>(p));
  std::free(p);
}

bool Sim::is_pinned(const void* p) const {
  auto it = pinned_.upper_bound(const_cast<char*>(static_cast<const char*>(p)));
  if (it == pinned_.begin()) return false;
  --it;
  return static_cast<const char*>(p) < it->first + it->second;
}

StreamHandle Sim::create_stream(Priority) {
  const std::lock_guard lock(mutex_);
  streams_.push_back(new SimStream{this, {}, false, {}});
  return streams_.back();
}

void Sim::destroy_stream(StreamHandle handle) noexcept {
  const std::lock_guard lock(mutex_);
  auto* stream = static_cast<SimStream*>(handle);
  while (!error_ && !stream->queue.empty() && advance()) {
  }
  std::erase(streams_, stream);
  delete stream;
}

SimStream* Sim::checked(StreamHandle handle) {
  auto* stream = static_cast<SimStream*>(handle);
  NRL_CHECK(stream && stream->owner == this, "a stream of another device");
  return stream;
}

SimEvent* Sim::checked_event(EventHandle handle) {
  auto* event = static_cast<SimEvent*>(handle);
  NRL_CHECK(events_.contains(event), "an event of another device");
  return event;
}

bool Sim::advance() {
  std::vector<SimStream*> ready;
  for (SimStream* s : streams_) {
    while (!s->queue.empty() && s->queue.front().event &&
           s->queue.front().event->done >= s->queue.front().wanted)
      s->queue.pop_front();
    if (!s->queue.empty() && !s->queue.front().event) ready.push_back(s);
  }
  if (ready.empty()) return false;
  SimStream* s = ready[random_() % ready.size()];
  const Closure work = std::move(s->queue.front().run);
  s->queue.pop_front();
  try {
    work();
  } catch (...) {
    error_ = std::current_exception();
  }
  return true;
}

template <class Done>
void Sim::advance_until(const Done& done, const char* what) {
  while (!done()) {
    raise();
    NRL_CHECK(advance(), "{} waits for ever: streams wait for events that nothing will record", what);
  }
  raise();
}

void Sim::not_while_capturing(const char* call) const {
  NRL_CHECK(!capture_, "{} while a graph is recorded", call);
}

void Sim::enqueue(SimStream* stream, Closure work) {
  const std::lock_guard lock(mutex_);
  raise();
  if (stream->capturing) {
    capture_->nodes.push_back({std::move(work), stream->after});
    stream->after = {static_cast<int>(capture_->nodes.size()) - 1};
    return;
  }
  stream->queue.push_back({std::move(work)});
  if (!options_.deferred) advance_until([&] { return stream->queue.empty(); }, "enqueue");
  while (stream->queue.size() > longest_queue && advance()) raise();
}

void Sim::synchronize(StreamHandle handle) {
  const std::lock_guard lock(mutex_);
  SimStream* stream = checked(handle);
  NRL_CHECK(!stream->capturing, "synchronize of a stream that is recorded");
  advance_until([&] { return stream->queue.empty(); }, "synchronize");
}

void Sim::synchronize() {
  const std::lock_guard lock(mutex_);
  not_while_capturing("synchronize");
  advance_until(
      [&] {
        for (const SimStream* s : streams_)
          if (!s->queue.empty()) return false;
        return true;
      },
      "synchronize");
}

EventHandle Sim::create_event(EventKind kind) {
  const std::lock_guard lock(mutex_);
  auto* event = new SimEvent;
  event->kind = kind;
  events_.insert(event);
  return event;
}

void Sim::destroy_event(EventHandle handle) noexcept {
  const std::lock_guard lock(mutex_);
  auto* event = static_cast<SimEvent*>(handle);
  while (!error_ && event->done < event->recorded && advance()) {
  }
  for (SimStream* s : streams_) std::erase_if(s->queue, [event](const Entry& e) { return e.event == event; });
  events_.erase(event);
  delete event;
}

void Sim::record(EventHandle handle, StreamHandle stream_handle) {
  const std::lock_guard lock(mutex_);
  raise();
  SimStream* stream = checked(stream_handle);
  SimEvent* event = checked_event(handle);
  if (stream->capturing) {
    event->captured = true;
    event->after = stream->after;
    return;
  }
  event->captured = false;
  const uint64_t number = ++event->recorded;
  enqueue(stream, [event, number] {
    event->done = number;
    event->time_ms = now_ms();
  });
}

void Sim::wait(StreamHandle stream_handle, EventHandle handle) {
  const std::lock_guard lock(mutex_);
  raise();
  SimStream* stream = checked(stream_handle);
  SimEvent* event = checked_event(handle);
  if (event->captured) {
    NRL_CHECK(capture_, "a stream waits for an event that was recorded into a graph");
    stream->capturing = true;
    stream->after.insert(event->after.begin(), event->after.end());
    return;
  }
  NRL_CHECK(!stream->capturing || event->recorded == event->done,
            "a recorded stream waits for an event from outside of the graph");
  if (!stream->capturing && event->done < event->recorded)
    stream->queue.push_back({nullptr, event, event->recorded});
}

bool Sim::done(EventHandle handle) {
  const std::lock_guard lock(mutex_);
  raise();
  SimEvent* event = checked_event(handle);
  NRL_CHECK(!event->captured, "the state of an event that was recorded into a graph");
  if (event->done >= event->recorded) return true;
  advance();
  raise();
  return event->done >= event->recorded;
}

void Sim::synchronize_event(EventHandle handle) {
  const std::lock_guard lock(mutex_);
  SimEvent* event = checked_event(handle);
  NRL_CHECK(!event->captured, "waiting for an event that was recorded into a graph");
  const uint64_t wanted = event->recorded;
  advance_until([&] { return event->done >= wanted; }, "waiting for an event");
}

double Sim::elapsed_ms(EventHandle begin, EventHandle end) {
  const std::lock_guard lock(mutex_);
  SimEvent *a = checked_event(begin), *b = checked_event(end);
  NRL_CHECK(a->kind == EventKind::timed && b->kind == EventKind::timed && a->recorded > 0 &&
                b->recorded > 0 && a->done == a->recorded && b->done == b->recorded,
            "time between events that are not timed or not done");
  return b->time_ms - a->time_ms;
}

void Sim::copy(void* to, const void* from, size_t bytes, CopyKind kind, StreamHandle handle) {
  const std::lock_guard lock(mutex_);
  SimStream* stream = checked(handle);
  const void* host = kind == CopyKind::host_to_device   ? from
                     : kind == CopyKind::device_to_host ? to
                                                        : nullptr;
  const bool pageable = host && !is_pinned(host);
  NRL_CHECK(!pageable || !stream->capturing, "a copy of pageable memory cannot be recorded");
  enqueue(stream, [=] { std::memcpy(to, from, bytes); });
  if (pageable) advance_until([&] { return stream->queue.empty(); }, "a copy of pageable memory");
}

void Sim::fill(void* p, uint8_t value, size_t bytes, StreamHandle stream) {
  enqueue(checked(stream), [=] { std::memset(p, value, bytes); });
}

void Sim::call_host(void (*function)(void*), void* argument, StreamHandle stream) {
  enqueue(checked(stream), [=] { function(argument); });
}

void Sim::begin_capture(StreamHandle handle) {
  const std::lock_guard lock(mutex_);
  raise();
  not_while_capturing("begin_capture");
  origin_ = checked(handle);
  capture_ = *graphs_.insert(new SimGraph).first;
  origin_->capturing = true;
  origin_->after.clear();
}

GraphHandle Sim::end_capture(StreamHandle handle) {
  const std::lock_guard lock(mutex_);
  raise();
  NRL_CHECK(capture_ && checked(handle) == origin_, "end_capture of a stream that does not record");
  // Everything must lie before the end of the stream where the recording began.
  std::set<int> before;
  std::vector<int> open(origin_->after.begin(), origin_->after.end());
  while (!open.empty()) {
    const int node = open.back();
    open.pop_back();
    if (!before.insert(node).second) continue;
    const auto& after = capture_->nodes[static_cast<size_t>(node)].after;
    open.insert(open.end(), after.begin(), after.end());
  }
  const bool joined = before.size() == capture_->nodes.size();
  for (SimStream* s : streams_) {
    s->capturing = false;
    s->after.clear();
  }
  SimGraph* graph = std::exchange(capture_, nullptr);
  origin_ = nullptr;
  if (!joined) destroy_graph(graph);
  NRL_CHECK(joined, "work was recorded on a stream that was not joined back");
  return graph;
}

void Sim::replay(const SimGraph& graph) {
  std::vector<size_t> missing(graph.nodes.size());
  std::vector<std::vector<size_t>> next(graph.nodes.size());
  std::vector<size_t> ready;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    missing[i] = graph.nodes[i].after.size();
    for (int a : graph.nodes[i].after) next[static_cast<size_t>(a)].push_back(i);
    if (missing[i] == 0) ready.push_back(i);
  }
  while (!ready.empty()) {
    std::swap(ready[random_() % ready.size()], ready.back());
    const size_t node = ready.back();
    ready.pop_back();
    Closure(graph.nodes[node].run)();
    for (size_t n : next[node])
      if (--missing[n] == 0) ready.push_back(n);
  }
}

void Sim::launch(GraphHandle handle, StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  auto* graph = static_cast<SimGraph*>(handle);
  NRL_CHECK(graphs_.contains(graph));
  enqueue(checked(stream), [this, graph] { replay(*graph); });
}

void Sim::destroy_graph(GraphHandle handle) noexcept {
  const std::lock_guard lock(mutex_);
  while (!error_ && advance()) {
  }
  auto* graph = static_cast<SimGraph*>(handle);
  graphs_.erase(graph);
  delete graph;
}

}  // namespace

std::unique_ptr<Runtime> open_sim(const SimOptions& options) {
  return std::make_unique<Sim>(options);
}

void sim_enqueue(StreamHandle stream, std::function<void()> work) {
  if (!stream) {
    work();
    return;
  }
  auto* s = static_cast<SimStream*>(stream);
  s->owner->enqueue(s, std::move(work));
}

}  // namespace nrl::device
