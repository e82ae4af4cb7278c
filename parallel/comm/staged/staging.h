#pragma once
// Private to the staged backend: pinned host memory and the copies between it and the device.

#include "core/device/runtime.h"
#include "parallel/comm/event_pool.h"
#include "parallel/comm/executor.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace nrl::comm {

/// Pinned memory that one chunk passes through.
struct StagingSlot {
  device::Memory memory;
  device::Event filled;   ///< recorded behind the copies from the device
  device::Event emptied;  ///< recorded behind the copies to it
  bool used = false;
};

/// What the staged communicators of a family share. Used within operations of the executor, which runs one at
/// a time; events(), ends() and abandon() may be called from elsewhere.
class Staging {
 public:
  Staging(device::Runtime& runtime, int64_t slot_bytes, int slots);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  device::Runtime& runtime() { return runtime_; }
  int64_t slot_bytes() const { return slot_bytes_; }
  EventPool& events() { return *events_; }
  /// For mark() only: such an event may be on loan again before it is done.
  EventPool& ends() { return *ends_; }

  /// Puts both copy streams behind an event.
  void follow(const device::Event& ready);
  /// Records an event behind all copies to the device so far.
  void mark(const device::Event& event) { event.record(in_.get()); }

  void to_host(void* host, const void* device, int64_t bytes);
  void to_device(void* device, const void* host, int64_t bytes);

  /// Moves `chunks` chunks: out(k, memory) puts the copies from the device into the stream, meet(k, memory)
  /// works on the chunk in host memory, in(k, memory) puts the copies back. While the ranks meet over a
  /// chunk, the one before it goes to the device and the next one comes from it.
  using Stage = std::function<void(int64_t k, std::byte* memory)>;
  void pipeline(int64_t chunks, const Stage& out, const Stage& meet, const Stage& in, Backoff backoff);

  /// Pinned memory for one message, used again once `free` is done.
  struct Buffer {
    device::Memory memory;
    device::Event free;
    bool used = false;
  };
  std::unique_ptr<Buffer> take(int64_t bytes);
  /// `landed`: copies to the device are under way from it.
  void give(std::unique_ptr<Buffer> buffer, bool landed);
  /// Keeps memory that something may still write to.
  void abandon(std::unique_ptr<Buffer> buffer) {
    const std::lock_guard lock(lost_mutex_);
    lost_.push_back(std::move(buffer));
  }

  /// Records a loaned event behind the copies from the device so far.
  void mark_out(const device::Event& event) { event.record(out_.get()); }
  /// Blocks until the event is done.
  static void await(const device::Event& event, Backoff backoff);
  /// Blocks until no copy is under way; for the way out after an error, throws nothing.
  void settle() noexcept;

 private:
  device::Runtime& runtime_;
  int64_t slot_bytes_;
  std::shared_ptr<EventPool> events_, ends_;
  device::Stream out_, in_;  // from and to the device
  std::vector<StagingSlot> slots_;
  size_t next_ = 0;
  std::vector<std::unique_ptr<Buffer>> free_;
  std::mutex lost_mutex_;
  std::vector<std::unique_ptr<Buffer>> lost_;
};

}  // namespace nrl::comm
