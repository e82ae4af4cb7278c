#include "core/device/dry_run.h"

#include <cstdlib>
#include <map>
#include <mutex>

#include <sys/mman.h>

#include "core/base/error.h"
#include "core/base/text.h"

namespace nrl::device {
namespace {

class DryRun final : public Runtime {
 public:
  explicit DryRun(const Properties& properties) { properties_ = properties; }
  ~DryRun() override {
    for (const auto& [address, bytes] : reserved_) munmap(address, bytes);
  }

  void bind_thread() override {}

  void* allocate(size_t bytes) override { return reserve(bytes, PROT_NONE); }
  void release(void* p) noexcept override {
    const std::lock_guard lock(mutex_);
    const auto block = reserved_.find(p);
    if (block == reserved_.end()) return;
    munmap(p, block->second);
    reserved_.erase(block);
  }
  void* allocate_pinned(size_t bytes) override {
    return reserve(bytes, PROT_READ | PROT_WRITE);  // takes no memory where nothing is written
  }
  void release_pinned(void* p) noexcept override { release(p); }
  size_t free_memory() override { return properties_.memory; }

  StreamHandle create_stream(Priority) override { return this; }
  void destroy_stream(StreamHandle) noexcept override {}
  void synchronize(StreamHandle) override {}
  void synchronize() override {}

  EventHandle create_event(EventKind) override { return this; }
  void destroy_event(EventHandle) noexcept override {}
  void record(EventHandle, StreamHandle) override {}
  void wait(StreamHandle, EventHandle) override {}
  bool done(EventHandle) override { return true; }
  void synchronize_event(EventHandle) override {}
  double elapsed_ms(EventHandle, EventHandle) override { return 0; }

  void copy(void*, const void*, size_t, CopyKind, StreamHandle) override {}
  void copy_rows(void*, int64_t, const void*, int64_t, size_t, int64_t, StreamHandle) override {}
  void fill(void*, uint8_t, size_t, StreamHandle) override {}
  void call_host(void (*)(void*), void*, StreamHandle) override { refuse("call_host"); }

  void begin_capture(StreamHandle) override { refuse("begin_capture"); }
  bool capturing(StreamHandle) override { return false; }
  GraphHandle end_capture(StreamHandle) override { refuse("end_capture"); }
  void discard_capture(StreamHandle) noexcept override {}
  void launch(GraphHandle, StreamHandle) override { refuse("launch"); }
  void destroy_graph(GraphHandle) noexcept override {}

 private:
  void* reserve(size_t bytes, int protection) {
    void* p = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
      fail(Exit::out_of_memory, "the system refused {} of address space for a dry run", human_bytes(bytes));
    const std::lock_guard lock(mutex_);
    reserved_[p] = bytes;
    return p;
  }

  [[noreturn]] static void refuse(const char* call) { fail(Exit::internal, "{} in a dry run", call); }

  std::mutex mutex_;
  std::map<void*, size_t> reserved_;
};

}  // namespace

std::unique_ptr<Runtime> open_dry_run(const Properties& properties) {
  return std::make_unique<DryRun>(properties);
}

}  // namespace nrl::device
