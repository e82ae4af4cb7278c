#pragma once
// The simulated device itself; sim.h opens one. Methods of Runtime lock the mutex; private methods are called
// with it locked, and those that run work release it meanwhile.

#include <condition_variable>
#include <exception>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "tests/sim/memory.h"
#include "tests/sim/queue.h"
#include "tests/sim/sim.h"

namespace nrl::sim {

[[noreturn]] void die(const std::string& text);

class Device;

/// Which device a stream belongs to: a kernel launch names only its stream.
struct Registry {
  std::mutex mutex;
  std::unordered_map<void*, Device*> owner;
  std::unordered_set<Device*> devices;
};
Registry& registry();

class Device final : public device::Runtime {
 public:
  explicit Device(const device::SimOptions& options);
  ~Device() override;

  void bind_thread() override;
  void* allocate(size_t bytes) override;
  void release(void* p) noexcept override;
  void* allocate_pinned(size_t bytes) override;
  void release_pinned(void* p) noexcept override;
  size_t free_memory() override;
  device::StreamHandle create_stream(device::Priority priority) override;
  void destroy_stream(device::StreamHandle stream) noexcept override;
  void synchronize(device::StreamHandle stream) override;
  void synchronize() override;
  device::EventHandle create_event(device::EventKind kind) override;
  void destroy_event(device::EventHandle event) noexcept override;
  void record(device::EventHandle event, device::StreamHandle stream) override;
  void wait(device::StreamHandle stream, device::EventHandle event) override;
  bool done(device::EventHandle event) override;
  void synchronize_event(device::EventHandle event) override;
  double elapsed_ms(device::EventHandle begin, device::EventHandle end) override;
  void copy(void* to, const void* from, size_t bytes, device::CopyKind kind,
            device::StreamHandle stream) override;
  void copy_rows(void* to, int64_t to_pitch, const void* from, int64_t from_pitch, size_t bytes, int64_t rows,
                 device::StreamHandle stream) override;
  void fill(void* p, uint8_t value, size_t bytes, device::StreamHandle stream) override;
  void call_host(void (*function)(void*), void* argument, device::StreamHandle stream) override;
  void begin_capture(device::StreamHandle stream) override;
  bool capturing(device::StreamHandle stream) override;
  device::GraphHandle end_capture(device::StreamHandle stream) override;
  void discard_capture(device::StreamHandle stream) noexcept override;
  void launch(device::GraphHandle graph, device::StreamHandle stream) override;
  void destroy_graph(device::GraphHandle graph) noexcept override;
  void profiler(bool on) override;

  void enqueue(device::StreamHandle stream, Closure work);
  void stall(device::StreamHandle stream);
  /// Device memory is accessible from open() to close().
  void open() {
    const std::lock_guard lock(mutex_);
    memory_.open();
  }
  void close() {
    const std::lock_guard lock(mutex_);
    memory_.close();
  }

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Open {
    explicit Open(Heap& heap, const Reach& reach = {}) : heap(heap) { heap.open(reach); }
    ~Open() { heap.close(); }
    Heap& heap;
  };

  Lock enter(const char* call);
  Lock enter_last(const char* call) noexcept;
  void check_bound(const char* call) const;
  void raise();
  Stream& stream_of(device::StreamHandle handle, const char* call);
  EventState& event_of(device::EventHandle handle, const char* call);

  void push(Lock& lock, Stream& stream, Item item);
  void push_work(Lock& lock, Stream& stream, Closure work, Reach reach = {});
  void order(Stream& stream);
  bool settle(Stream& stream);
  void pass_all();
  bool step(Lock& lock);
  void run(Lock& lock, Stream& stream, Closure* work, bool again);
  void advance_until(Lock& lock, const std::function<bool()>& done);
  void drain(Lock& lock) noexcept;
  std::shared_ptr<Point> mark(Lock& lock, Stream& stream);
  void no_capture_here(const char* call);
  void break_capture(const std::shared_ptr<Capture>& capture, const std::string& why);
  void leave_capture(const std::shared_ptr<Capture>& capture);

  device::SimOptions options_;
  uint64_t id_;
  std::mutex mutex_;
  std::condition_variable progress_;
  bool busy_ = false;  // a thread runs work, without holding the mutex
  std::mt19937_64 random_;
  uint64_t immediate_;  // one call in so many runs work when it is enqueued; 0: none
  Heap memory_{true}, pinned_{false};
  std::vector<std::unique_ptr<Stream>> streams_;  // in the order of their making
  uint64_t streams_made_ = 0;
  std::unordered_map<void*, std::unique_ptr<EventState>> events_;
  std::unordered_map<void*, std::shared_ptr<Graph>> graphs_;
  std::vector<std::shared_ptr<Capture>> captures_;  // active
  size_t waiting_ = 0;                              // items in all queues
  Stream* favorite_ = nullptr;                      // runs the next `burst_` pieces of work
  int burst_ = 0;
  std::exception_ptr error_;  // sticky, as a CUDA error is
  bool error_seen_ = false;
};

}  // namespace nrl::sim
