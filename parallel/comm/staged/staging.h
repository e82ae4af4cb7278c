#pragma once
// Private to the staged backend: pinned host memory and the copies between it and the device.

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "core/device/runtime.h"
#include "parallel/comm/event_pool.h"
#include "parallel/comm/task.h"

namespace nrl::comm {

/// One stream for copies in each direction.
class CopyStreams {
 public:
  explicit CopyStreams(device::Runtime& runtime)
      : runtime_(runtime), out_(runtime, device::Priority::high), in_(runtime, device::Priority::high) {}
  device::StreamHandle out() const { return out_.get(); }
  device::StreamHandle in() const { return in_.get(); }
  void to_host(void* host, const void* device, int64_t bytes) const;
  void to_device(void* device, const void* host, int64_t bytes) const;
  /// Blocks until no copy is in flight. For error paths.
  void drain() const noexcept;

 private:
  device::Runtime& runtime_;
  device::Stream out_, in_;  // from and to the device
};

/// Staging buffers of a group's collectives. Must be used by operations of the executor only.
class Staging {
 public:
  Staging(device::Runtime& runtime, int64_t slot_bytes, int slots);
  ~Staging() { copies_.drain(); }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  int64_t slot_bytes() const { return slot_bytes_; }
  const CopyStreams& copies() const { return copies_; }

  using Copies = std::function<void(int64_t k, std::byte* memory)>;
  using Exchange = std::function<Task(int64_t k, std::byte* memory)>;
  /// Pipelines `chunks` chunks: out(k, memory) enqueues the copies from the device, exchange(k, memory) runs
  /// the collective on host memory, in(k, memory) enqueues the copies back. The exchange of a chunk overlaps
  /// with the copies of the previous one to the device and of the next one from it.
  Task pipeline(int64_t chunks, Copies out, Exchange exchange, Copies in);

 private:
  /// The pinned staging buffer of one chunk.
  struct Slot {
    device::Memory memory;
    device::Event filled;   ///< recorded after the copies from the device
    device::Event emptied;  ///< recorded after the copies to it
    bool used = false;
  };
  int64_t slot_bytes_;
  CopyStreams copies_;
  std::vector<Slot> slots_;
  size_t next_ = 0;
};

/// Staging buffers of a group's messages. Must be used by operations of the executor only, except abandon().
class MessageStaging {
 public:
  explicit MessageStaging(device::Runtime& runtime) : runtime_(runtime), copies_(runtime) {}
  ~MessageStaging() { copies_.drain(); }
  MessageStaging(const MessageStaging&) = delete;
  MessageStaging& operator=(const MessageStaging&) = delete;

  const CopyStreams& copies() const { return copies_; }

  /// Pinned memory for one message; reusable once `free` has completed.
  struct Buffer {
    device::Memory memory;
    device::Event free;
    bool used = false;
  };
  std::unique_ptr<Buffer> take(int64_t bytes);
  /// `to_device`: copies to the device are in flight from it.
  void give(std::unique_ptr<Buffer> buffer, bool to_device);
  /// Keeps memory that a copy or message may still write to.
  void abandon(std::unique_ptr<Buffer> buffer) {
    const std::lock_guard lock(lost_mutex_);
    lost_.push_back(std::move(buffer));
  }

 private:
  device::Runtime& runtime_;
  CopyStreams copies_;
  std::vector<std::unique_ptr<Buffer>> free_;
  std::mutex lost_mutex_;
  std::vector<std::unique_ptr<Buffer>> lost_;
};

}  // namespace nrl::comm
