#include "tests/sim/device.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "core/base/error.h"
#include "tests/sim/engine/sanitizers.h"

namespace nrl::sim {
namespace {

constexpr size_t longest_queue = 1024;  // of all streams together

/// True while this thread runs work of a stream.
thread_local bool in_work = false;
/// Devices that this thread was bound to.
thread_local std::vector<uint64_t> bound;

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "something that is no std::exception";
  }
}

}  // namespace

Registry& registry() {
  static Registry r;
  return r;
}

void die(const std::string& text) {
  std::fprintf(stderr, "simulated device: %s\n", text.c_str());
  std::abort();
}

void Device::profiler(bool on) {
  std::fprintf(stderr, "simulated device: profiler %s\n", on ? "starts" : "stops");
}

Device::Device(const device::SimOptions& options) : options_(options), random_(options.seed) {
  static std::atomic<uint64_t> devices = 0;
  id_ = ++devices;
  constexpr uint64_t chances[] = {0, 0, 8, 2};
  immediate_ = chances[(options.seed - 1) % 4];
  properties_.name = "simulated";
  properties_.major = 9;
  properties_.multiprocessors = options.multiprocessors;
  properties_.memory = options.memory;
  properties_.shared_memory_optin = size_t{227} << 10;
  properties_.l2_cache = size_t{1} << 20;
  properties_.uuid = "simulated";
  properties_.simulated = true;
  bind_thread();
  const std::lock_guard lock(registry().mutex);
  registry().devices.insert(this);
}

Device::~Device() {
  {
    const std::lock_guard lock(registry().mutex);
    registry().devices.erase(this);
  }
  Lock lock(mutex_);
  drain(lock);
  std::string problem;
  const auto leaked = static_cast<size_t>(
      std::count_if(streams_.begin(), streams_.end(), [](const auto& s) { return !s->destroyed; }));
  if (leaked + events_.size() + graphs_.size() + memory_.count() + pinned_.count() > 0)
    problem = fmt::format(
        "not released: {} streams, {} events, {} graphs, {} blocks of device memory ({} bytes), {} of pinned "
        "memory",
        leaked, events_.size(), graphs_.size(), memory_.count(), memory_.used(), pinned_.count());
  if (!captures_.empty()) problem += fmt::format("{}a capture never ended", problem.empty() ? "" : "; ");
  if (error_ && !error_seen_)
    problem +=
        fmt::format("{}unreported asynchronous error: {}", problem.empty() ? "" : "; ", text_of(error_));
  {
    const std::lock_guard names(registry().mutex);
    for (const auto& s : streams_) registry().owner.erase(s.get());
  }
  if (problem.empty()) return;
  if (options_.on_problem)
    options_.on_problem(problem);
  else if (std::uncaught_exceptions() == 0)
    die(problem);
}

void Device::bind_thread() {
  if (std::find(bound.begin(), bound.end(), id_) == bound.end()) bound.push_back(id_);
}

// --- calls ---------------------------------------------------------------------------------------

Device::Lock Device::enter(const char* call) {
  if (in_work) fail(Exit::internal, "simulated device: {} was called by work of a stream", call);
  Lock lock(mutex_);
  raise();
  return lock;
}

Device::Lock Device::enter_last(const char* call) noexcept {
  if (in_work) die(fmt::format("{} was called by work of a stream", call));
  return Lock(mutex_);
}

void Device::check_bound(const char* call) const {
  if (std::find(bound.begin(), bound.end(), id_) == bound.end())
    fail(Exit::internal, "simulated device: {} by a thread that has not called bind_thread()", call);
}

void Device::raise() {
  if (!error_) return;
  error_seen_ = true;
  std::rethrow_exception(error_);
}

Stream& Device::stream_of(device::StreamHandle handle, const char* call) {
  for (const auto& s : streams_)
    if (s.get() == handle && !s->destroyed) return *s;
  fail(Exit::internal, "simulated device: {}: {}", call,
       handle ? "no stream of this device, or one that was destroyed" : "no stream was given");
}

EventState& Device::event_of(device::EventHandle handle, const char* call) {
  const auto it = events_.find(handle);
  if (it == events_.end())
    fail(Exit::internal, "simulated device: {}: no event of this device, or one that was destroyed", call);
  return *it->second;
}

// --- running -------------------------------------------------------------------------------------

/// Tells the thread sanitizer what the item at the front of a queue means.
void Device::order(Stream& stream) {
  stream.thread.run(
      [](void* argument) {
        auto& s = *static_cast<Stream*>(argument);
        const Item& item = s.queue.front();
        if (item.issued) sanitizer::acquire(item.issued.get());
        if (item.kind == Item::Kind::wait) sanitizer::acquire(item.point.get());
        if (item.kind == Item::Kind::mark) sanitizer::release(item.point.get());
        sanitizer::release(&s);
      },
      &stream);
}

/// Pops completed waits and marks from the head of a queue; true if runnable work remains.
bool Device::settle(Stream& stream) {
  while (!stream.queue.empty()) {
    Item& item = stream.queue.front();
    if (item.kind == Item::Kind::work) return true;
    if (item.kind == Item::Kind::graph && !item.replay->over()) return true;
    if (item.kind == Item::Kind::wait && !item.point->done) return false;
    if (sanitizer::thread()) {
      order(stream);
      if (item.replay && item.replay->last()) sanitizer::acquire(&stream);
    }
    if (item.kind == Item::Kind::mark) {
      item.point->done = true;
      item.point->time_ms = now_ms();
    }
    stream.queue.pop_front();
    --waiting_;
  }
  return false;
}

/// Runs a closure as the stream, without the mutex. What the closure owns goes as a part of the work, unless
/// it will run again.
void Device::run(Lock& lock, Stream& stream, Closure* work, bool again) {
  struct Piece {
    Closure* work;
    void *issued, *stream;
    bool again;
    std::exception_ptr error;
  } piece{work, stream.queue.front().issued.get(), &stream, again, nullptr};
  busy_ = true;
  lock.unlock();
  in_work = true;
  stream.thread.run(
      [](void* argument) {
        auto& p = *static_cast<Piece*>(argument);
        sanitizer::acquire(p.issued);
        try {
          (*p.work)();
        } catch (...) {
          p.error = std::current_exception();
        }
        if (!p.again) delete p.work;
        sanitizer::release(p.stream);
      },
      &piece);
  in_work = false;
  lock.lock();
  busy_ = false;
  if (!piece.error) return;
  sanitizer::acquire(&stream);
  if (!error_) error_ = piece.error;
}

/// One piece of work of a random stream; false when no stream can run.
bool Device::step(Lock& lock) {
  std::vector<Stream*> ready;
  for (bool passed = true; passed;) {  // passing a mark may free another stream
    const size_t before = waiting_;
    ready.clear();
    for (const auto& s : streams_)
      if (settle(*s)) ready.push_back(s.get());
    passed = waiting_ != before;
  }
  std::erase_if(streams_, [this](const auto& s) {
    if (!s->destroyed || !s->queue.empty()) return false;
    if (favorite_ == s.get()) favorite_ = nullptr;
    return true;
  });
  if (ready.empty()) return false;
  if (burst_ == 0 || std::find(ready.begin(), ready.end(), favorite_) == ready.end()) {
    // Streams that run far ahead of others are as legal as ones that take turns.
    constexpr int bursts[] = {1, 1, 4, 1000};
    favorite_ = ready[random_() % ready.size()];
    burst_ = bursts[random_() % 4];
  }
  --burst_;
  Stream& stream = *favorite_;
  Item& item = stream.queue.front();  // stays where it is: others only push behind it
  if (item.kind == Item::Kind::work) {
    const Open open(memory_, item.reach);
    run(lock, stream, item.work.release(), false);
    stream.queue.pop_front();
    --waiting_;
  } else {
    const int number = item.replay->take(random_);
    Graph::Node& node = item.replay->node(number);
    const Open open(memory_, node.reach);
    run(lock, stream, &node.work, true);
    item.replay->finish(number);
  }
  if (error_) pass_all();
  progress_.notify_all();
  return true;
}

/// After an error nothing runs any more, and no call may wait.
void Device::pass_all() {
  for (const auto& s : streams_) {
    for (Item& item : s->queue)
      if (item.point) item.point->done = true;
    waiting_ -= s->queue.size();
    s->queue.clear();
  }
}

void Device::advance_until(Lock& lock, const std::function<bool()>& done) {
  while (!error_) {
    for (const auto& s : streams_) settle(*s);
    if (done()) break;
    if (busy_)
      progress_.wait(lock);
    else if (!step(lock) && !done())
      die("streams wait for events that nothing will record");
  }
  raise();
}

void Device::drain(Lock& lock) noexcept {
  while (!error_) {
    if (busy_)
      progress_.wait(lock);
    else if (!step(lock))
      break;
  }
}

// --- enqueueing ----------------------------------------------------------------------------------

void Device::push(Lock& lock, Stream& stream, Item item) {
  stream.queue.push_back(std::move(item));
  if (sanitizer::thread()) {
    auto& issued = stream.queue.back().issued = std::make_unique<char>();
    sanitizer::release(issued.get());
  }
  ++waiting_;
  if (!options_.deferred) {
    advance_until(lock, [&] { return stream.queue.empty(); });
  } else if (immediate_ > 0 && random_() % immediate_ == 0) {
    for (uint64_t n = random_() % 8; n > 0 && !busy_ && !error_ && step(lock); --n) {
    }
    raise();
  }
  if (waiting_ > longest_queue) advance_until(lock, [&] { return waiting_ <= longest_queue / 2; });
}

void Device::push_work(Lock& lock, Stream& stream, Closure work, Reach reach) {
  if (stream.capture) {
    auto& nodes = stream.capture->graph->nodes;
    nodes.push_back({std::move(work), std::move(reach), stream.tail});
    stream.tail = {static_cast<int>(nodes.size()) - 1};
    return;
  }
  Item item;
  item.work = std::make_unique<Closure>(std::move(work));
  item.reach = std::move(reach);
  push(lock, stream, std::move(item));
}

std::shared_ptr<Point> Device::mark(Lock& lock, Stream& stream) {
  Item item;
  item.kind = Item::Kind::mark;
  auto point = item.point = std::make_shared<Point>();
  push(lock, stream, std::move(item));
  return point;
}

void Device::enqueue(device::StreamHandle handle, Closure work) {
  Lock lock = enter("a kernel launch");
  check_bound("a kernel launch");
  push_work(lock, stream_of(handle, "a kernel launch"), std::move(work));
}

void Device::stall(device::StreamHandle handle) {
  Lock lock = enter("stall");
  Stream& stream = stream_of(handle, "stall");
  Item item;
  item.kind = Item::Kind::wait;
  item.point = std::make_shared<Point>();
  push(lock, stream, std::move(item));
}

}  // namespace nrl::sim

namespace nrl::device {

std::unique_ptr<Runtime> open_sim(const SimOptions& options) {
  return std::make_unique<sim::Device>(options);
}

void sim_stall(Runtime& device, StreamHandle stream) {
  static_cast<sim::Device&>(device).stall(stream);
}

void sim_enqueue(StreamHandle stream, std::function<void()> work) {
  sim::Registry& r = sim::registry();
  if (stream) {
    sim::Device* owner = nullptr;
    {
      const std::lock_guard lock(r.mutex);
      if (const auto it = r.owner.find(stream); it != r.owner.end()) owner = it->second;
    }
    if (!owner)
      fail(Exit::internal, "simulated device: a kernel launch on no stream, or on one that was destroyed");
    owner->enqueue(stream, std::move(work));
    return;
  }
  // Tests run kernels on device memory of whatever device there is.
  struct OpenAll {
    explicit OpenAll(sim::Registry& r) {
      {
        const std::lock_guard lock(r.mutex);
        devices.assign(r.devices.begin(), r.devices.end());
      }
      // A device locks itself before the registry.
      for (sim::Device* d : devices) d->open();
    }
    ~OpenAll() {
      for (sim::Device* d : devices) d->close();
    }
    std::vector<sim::Device*> devices;
  };
  if (sim::in_work) {
    work();
    return;
  }
  const OpenAll open(r);
  work();
}

}  // namespace nrl::device
