#pragma once
// One accelerator of this process: memory, streams, events and graphs. Two implementations: CUDA (cuda/) and
// a simulated device that carries out the same calls on the host (tests/sim), so that everything above is
// tested where there is no GPU.
//
// A call that fails throws Error: Exit::out_of_memory when memory is short, Exit::internal otherwise, with
// the name of the call. Errors of work in a stream surface in a later call, at the latest in synchronize().
// Methods may be called from several threads; the caller must order its calls on one stream.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace nrl::device {

/// Facts about the device, read once.
struct Properties {
  std::string name;
  int ordinal = 0;
  int major = 0, minor = 0;  ///< compute capability
  int multiprocessors = 0;
  size_t memory = 0;               ///< bytes
  size_t shared_memory_optin = 0;  ///< bytes of shared memory a block may ask for
  size_t l2_cache = 0;             ///< bytes
  double memory_bandwidth = 0;     ///< bytes/s by the data sheet's clock and width; 0: unknown
  std::string uuid;                ///< "GPU-..."; tells whether two ranks share a device
  bool simulated = false;
};

/// A queue of work; work of one stream runs in order. cudaStream_t on CUDA.
using StreamHandle = void*;
/// A point in a stream. cudaEvent_t on CUDA.
using EventHandle = void*;
using GraphHandle = void*;

enum class Priority : uint8_t { normal, high };
/// `timed` events can be subtracted (elapsed_ms); others are cheaper.
enum class EventKind : uint8_t { order, timed };
enum class CopyKind : uint8_t { host_to_device, device_to_host, device_to_device };

/// Another source of device memory than Runtime::allocate(), with the same errors. Empty: that one.
struct Allocator {
  void* (*allocate)(size_t bytes) = nullptr;
  void (*release)(void* p) noexcept = nullptr;
};

class Runtime {
 public:
  virtual ~Runtime() = default;
  Runtime() = default;
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  const Properties& properties() const { return properties_; }

  /// Makes the device current for the calling thread; once per thread that launches work.
  virtual void bind_thread() = 0;

  /// Device memory, 256-byte aligned, contents undefined.
  virtual void* allocate(size_t bytes) = 0;
  virtual void release(void* p) noexcept = 0;
  /// Page-locked host memory, zeroed: copies to and from it run asynchronously.
  virtual void* allocate_pinned(size_t bytes) = 0;
  virtual void release_pinned(void* p) noexcept = 0;
  /// Free device memory in bytes, as the driver tells it.
  virtual size_t free_memory() = 0;

  virtual StreamHandle create_stream(Priority priority) = 0;
  virtual void destroy_stream(StreamHandle stream) noexcept = 0;
  virtual void synchronize(StreamHandle stream) = 0;
  /// Until everything of this process is done.
  virtual void synchronize() = 0;

  virtual EventHandle create_event(EventKind kind) = 0;
  virtual void destroy_event(EventHandle event) noexcept = 0;
  virtual void record(EventHandle event, StreamHandle stream) = 0;
  /// Work enqueued on `stream` from now on starts after the event's last record().
  virtual void wait(StreamHandle stream, EventHandle event) = 0;
  /// True when the work before the last record() is done; does not block.
  virtual bool done(EventHandle event) = 0;
  virtual void synchronize_event(EventHandle event) = 0;
  /// Milliseconds between two timed events that are both done.
  virtual double elapsed_ms(EventHandle begin, EventHandle end) = 0;

  /// Asynchronous; `host` memory must be pinned to be so and stay untouched until the stream has passed.
  virtual void copy(void* to, const void* from, size_t bytes, CopyKind kind, StreamHandle stream) = 0;
  /// Several rows of `bytes` each on the device, whose starts are the pitches (in bytes) apart: at least
  /// `bytes`, and less than 2 GiB.
  virtual void copy_rows(void* to, int64_t to_pitch, const void* from, int64_t from_pitch, size_t bytes,
                         int64_t rows, StreamHandle stream) {
    for (int64_t r = 0; r < rows; ++r)
      copy(static_cast<char*>(to) + r * to_pitch, static_cast<const char*>(from) + r * from_pitch, bytes,
           CopyKind::device_to_device, stream);
  }
  virtual void fill(void* p, uint8_t value, size_t bytes, StreamHandle stream) = 0;
  /// Runs `function(argument)` on a host thread in stream order; it must not call the runtime.
  virtual void call_host(void (*function)(void*), void* argument, StreamHandle stream) = 0;

  /// Everything enqueued on `stream`, and on streams that wait for events recorded in it, is captured until
  /// end_capture() instead of run. Streams that joined must be joined back by an event before the end.
  virtual void begin_capture(StreamHandle stream) = 0;
  /// True while work for `stream` is captured instead of run.
  virtual bool capturing(StreamHandle stream) = 0;
  virtual GraphHandle end_capture(StreamHandle stream) = 0;
  /// Ends a capture and discards it. Its streams can be used as before.
  virtual void discard_capture(StreamHandle stream) noexcept = 0;
  virtual void launch(GraphHandle graph, StreamHandle stream) = 0;
  virtual void destroy_graph(GraphHandle graph) noexcept = 0;

  /// Starts or ends the capture of a profiler around this process, such as Nsight Systems.
  virtual void profiler(bool /*on*/) {}

 protected:
  Properties properties_;
};

/// The CUDA device with this ordinal (among those visible). Fails with Exit::unavailable and the reason where
/// there is none, or where the build has no CUDA.
std::unique_ptr<Runtime> open_cuda(int ordinal);

class Stream {
 public:
  Stream() = default;
  Stream(Runtime& runtime, Priority priority = Priority::normal)
      : runtime_(&runtime), handle_(runtime.create_stream(priority)) {}
  ~Stream() { reset(); }
  Stream(Stream&& o) noexcept { swap(o); }
  Stream& operator=(Stream&& o) noexcept {
    swap(o);
    return *this;
  }
  StreamHandle get() const { return handle_; }
  void synchronize() const { runtime_->synchronize(handle_); }

 private:
  void swap(Stream& o) {
    std::swap(runtime_, o.runtime_);
    std::swap(handle_, o.handle_);
  }
  void reset() {
    if (runtime_ && handle_) runtime_->destroy_stream(handle_);
    handle_ = nullptr;
  }
  Runtime* runtime_ = nullptr;
  StreamHandle handle_ = nullptr;
};

class Event {
 public:
  Event() = default;
  explicit Event(Runtime& runtime, EventKind kind = EventKind::order)
      : runtime_(&runtime), handle_(runtime.create_event(kind)) {}
  ~Event() {
    if (runtime_ && handle_) runtime_->destroy_event(handle_);
  }
  Event(Event&& o) noexcept { swap(o); }
  Event& operator=(Event&& o) noexcept {
    swap(o);
    return *this;
  }
  EventHandle get() const { return handle_; }
  void record(StreamHandle stream) const { runtime_->record(handle_, stream); }
  void wait_in(StreamHandle stream) const { runtime_->wait(stream, handle_); }
  bool done() const { return runtime_->done(handle_); }
  void synchronize() const { runtime_->synchronize_event(handle_); }

 private:
  void swap(Event& o) {
    std::swap(runtime_, o.runtime_);
    std::swap(handle_, o.handle_);
  }
  Runtime* runtime_ = nullptr;
  EventHandle handle_ = nullptr;
};

/// A block of device or pinned host memory with its owner.
class Memory {
 public:
  enum class Kind : uint8_t { device, pinned };
  Memory() = default;
  /// `from`: of device memory.
  Memory(Runtime& runtime, Kind kind, size_t bytes, const Allocator& from = {})
      : runtime_(&runtime),
        kind_(kind),
        from_(from),
        size_(bytes),
        data_(bytes == 0             ? nullptr
              : kind != Kind::device ? runtime.allocate_pinned(bytes)
              : from.allocate        ? from.allocate(bytes)
                                     : runtime.allocate(bytes)) {}
  ~Memory() {
    if (!data_) return;
    if (kind_ != Kind::device)
      runtime_->release_pinned(data_);
    else if (from_.release)
      from_.release(data_);
    else
      runtime_->release(data_);
  }
  Memory(Memory&& o) noexcept { swap(o); }
  Memory& operator=(Memory&& o) noexcept {
    swap(o);
    return *this;
  }
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  size_t size() const { return size_; }

 private:
  void swap(Memory& o) {
    std::swap(runtime_, o.runtime_);
    std::swap(kind_, o.kind_);
    std::swap(from_, o.from_);
    std::swap(size_, o.size_);
    std::swap(data_, o.data_);
  }
  Runtime* runtime_ = nullptr;
  Kind kind_ = Kind::device;
  Allocator from_;
  size_t size_ = 0;
  void* data_ = nullptr;
};

/// Captures the work of a stream until end(). Without end(), after an exception for example, the destructor
/// discards the capture. Same thread throughout.
class Capture {
 public:
  Capture(Runtime& runtime, StreamHandle stream) : runtime_(&runtime), stream_(stream) {
    runtime.begin_capture(stream);
  }
  ~Capture() {
    if (runtime_) runtime_->discard_capture(stream_);
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
  /// The graph. Fails if the capture was broken; it is over then, too.
  GraphHandle end() { return std::exchange(runtime_, nullptr)->end_capture(stream_); }

 private:
  Runtime* runtime_;  // null: ended
  StreamHandle stream_;
};

/// Captured work that is launched as one.
class Graph {
 public:
  Graph() = default;
  Graph(Runtime& runtime, GraphHandle handle) : runtime_(&runtime), handle_(handle) {}
  ~Graph() {
    if (runtime_ && handle_) runtime_->destroy_graph(handle_);
  }
  Graph(Graph&& o) noexcept { swap(o); }
  Graph& operator=(Graph&& o) noexcept {
    swap(o);
    return *this;
  }
  explicit operator bool() const { return handle_ != nullptr; }
  void launch(StreamHandle stream) const { runtime_->launch(handle_, stream); }

 private:
  void swap(Graph& o) {
    std::swap(runtime_, o.runtime_);
    std::swap(handle_, o.handle_);
  }
  Runtime* runtime_ = nullptr;
  GraphHandle handle_ = nullptr;
};

}  // namespace nrl::device
