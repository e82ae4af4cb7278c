#include "tests/ops/device_backend.h"

#include <chrono>
#include <cstring>
#include <map>
#include <new>
#include <thread>
#include <type_traits>

#include "core/device/runtime.h"
#include "tests/ops/cases.h"

namespace nrl::ops_test {
namespace {

constexpr auto busy_time = std::chrono::microseconds(100);
constexpr size_t scratch_bytes = size_t{96} << 20;
constexpr auto alignment = std::align_val_t{256};  // as device memory: plans depend on it

/// The memory of Buffers on both sides.
class Mirror {
 public:
  void open(device::Runtime& device, device::StreamHandle stream) {
    device_ = &device;
    stream_ = stream;
  }
  void* allocate(size_t bytes) {
    auto* const host = static_cast<std::byte*>(::operator new(bytes, alignment));
    blocks_.emplace(host, Block{bytes, device::Memory(*device_, device::Memory::Kind::device, bytes)});
    return host;
  }
  void release(void* host) {
    blocks_.erase(static_cast<std::byte*>(host));
    ::operator delete(host, alignment);
  }

  /// The device's address for one in a Buffer; other addresses stay as they are.
  void translate(void*& address) const {
    auto* const p = static_cast<std::byte*>(address);
    auto it = blocks_.upper_bound(p);
    if (it == blocks_.begin()) return;
    --it;
    const auto& [host, block] = *it;
    if (p < host + block.bytes) address = block.device.data() + (p - host);
  }
  /// With the device's address in place of every address in a Buffer.
  template <class Args>
  Args translated(Args args) const {
    static_assert(std::is_trivially_copyable_v<Args> && alignof(Args) == alignof(void*));
    // A stale address may remain in the padding beside a small member, which its translation would change.
    __builtin_clear_padding(&args);
    for (size_t at = 0; at < sizeof(Args); at += sizeof(void*)) {
      void* word;
      std::memcpy(&word, reinterpret_cast<std::byte*>(&args) + at, sizeof word);
      translate(word);
      std::memcpy(reinterpret_cast<std::byte*>(&args) + at, &word, sizeof word);
    }
    return args;
  }

  void to_device() const {
    for (const auto& [host, block] : blocks_)
      device_->copy(block.device.data(), host, block.bytes, device::CopyKind::host_to_device, stream_);
  }
  void to_host() const {
    for (const auto& [host, block] : blocks_)
      device_->copy(host, block.device.data(), block.bytes, device::CopyKind::device_to_host, stream_);
    device_->synchronize(stream_);
  }
  void keep_busy() const {
    device_->call_host([](void*) { std::this_thread::sleep_for(busy_time); }, nullptr, stream_);
  }

  bool running = false;  ///< a kernel calls another through the table

 private:
  struct Block {
    size_t bytes;
    device::Memory device;
  };
  device::Runtime* device_ = nullptr;
  device::StreamHandle stream_ = nullptr;
  std::map<std::byte*, Block> blocks_;
};

Mirror& mirror() {
  static Mirror m;
  return m;
}

/// Runs `work` on the device's copies of all Buffers.
template <class Work>
void on_device(const Work& work) {
  Mirror& m = mirror();
  if (m.running) return work();
  struct Running {
    Running() { mirror().running = true; }
    ~Running() { mirror().running = false; }
  } const running;
  m.to_device();
  m.keep_busy();
  work();
  m.to_host();
}

/// The device, for ops that use it beside the kernels: zero() fills memory.
class MirroredRuntime final : public device::Runtime {
 public:
  explicit MirroredRuntime(std::shared_ptr<device::Runtime> device) : device_(std::move(device)) {
    properties_ = device_->properties();
  }
  void fill(void* p, uint8_t value, size_t bytes, device::StreamHandle stream) override {
    on_device([&] {
      mirror().translate(p);
      device_->fill(p, value, bytes, stream);
    });
  }

  using Stream = device::StreamHandle;
  using Event = device::EventHandle;
  using Graph = device::GraphHandle;
  void bind_thread() override { device_->bind_thread(); }
  void* allocate(size_t bytes) override { return device_->allocate(bytes); }
  void release(void* p) noexcept override { device_->release(p); }
  void* allocate_pinned(size_t bytes) override { return device_->allocate_pinned(bytes); }
  void release_pinned(void* p) noexcept override { device_->release_pinned(p); }
  size_t free_memory() override { return device_->free_memory(); }
  Stream create_stream(device::Priority priority) override { return device_->create_stream(priority); }
  void destroy_stream(Stream stream) noexcept override { device_->destroy_stream(stream); }
  void synchronize(Stream stream) override { device_->synchronize(stream); }
  void synchronize() override { device_->synchronize(); }
  Event create_event(device::EventKind kind) override { return device_->create_event(kind); }
  void destroy_event(Event event) noexcept override { device_->destroy_event(event); }
  void record(Event event, Stream stream) override { device_->record(event, stream); }
  void wait(Stream stream, Event event) override { device_->wait(stream, event); }
  bool done(Event event) override { return device_->done(event); }
  void synchronize_event(Event event) override { device_->synchronize_event(event); }
  double elapsed_ms(Event begin, Event end) override { return device_->elapsed_ms(begin, end); }
  void copy(void* to, const void* from, size_t bytes, device::CopyKind kind, Stream stream) override {
    device_->copy(to, from, bytes, kind, stream);
  }
  void call_host(void (*function)(void*), void* argument, Stream stream) override {
    device_->call_host(function, argument, stream);
  }
  void begin_capture(Stream stream) override { device_->begin_capture(stream); }
  bool capturing(Stream stream) override { return device_->capturing(stream); }
  Graph end_capture(Stream stream) override { return device_->end_capture(stream); }
  void discard_capture(Stream stream) noexcept override { device_->discard_capture(stream); }
  void launch(Graph graph, Stream stream) override { device_->launch(graph, stream); }
  void destroy_graph(Graph graph) noexcept override { device_->destroy_graph(graph); }

 private:
  std::shared_ptr<device::Runtime> device_;
};

/// Wraps one entry of the table.
template <int entry, class Args>
struct Wrapped {
  static inline void (*kernel)(ops::Exec&, const Args&) = nullptr;
  static void run(ops::Exec& exec, const Args& args) {
    on_device([&] {
      const Args device_args = mirror().translated(args);
      ops::Exec device_exec = exec;
      void* workspace = exec.workspace.data;
      mirror().translate(workspace);
      device_exec.workspace.data = static_cast<std::byte*>(workspace);
      kernel(device_exec, device_args);
    });
  }
};

ops::KernelTable wrapped(const ops::KernelTable& table) {
  ops::KernelTable out;
#define NRL_WRAP(entry, Args)                                           \
  if (table.entry) {                                                    \
    using W = Wrapped<static_cast<int>(ops::Kernel::entry), ops::Args>; \
    W::kernel = table.entry;                                            \
    out.entry = W::run;                                                 \
  }
  NRL_KERNELS(NRL_WRAP)
#undef NRL_WRAP
  return out;
}

}  // namespace

Backend device_backend(std::string name, std::shared_ptr<device::Runtime> device,
                       std::shared_ptr<device::Stream> stream, const ops::KernelTable& kernels,
                       std::shared_ptr<ops::Libraries> libraries) {
  mirror().open(*device, stream->get());
  buffer_memory().allocate = [](size_t bytes) { return mirror().allocate(bytes); };
  buffer_memory().release = [](void* p) { mirror().release(p); };
  Backend b;
  b.name = std::move(name);
  b.gpu = true;
  b.kernels = complete(wrapped(kernels));
  b.libraries = std::move(libraries);
  b.scratch = std::make_shared<device::Memory>(*device, device::Memory::Kind::device, scratch_bytes);
  device->fill(b.scratch->data(), 0xff, scratch_bytes, stream->get());
  b.device = std::make_shared<MirroredRuntime>(std::move(device));
  b.stream = std::move(stream);
  return b;
}

}  // namespace nrl::ops_test
