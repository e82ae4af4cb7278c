#pragma once
// A copy of what this rank saves in a checkpoint, in host memory of the planned size
// (plan::snapshot_bytes()), from which the checkpoint is saved while the next steps run.

#include <cstddef>
#include <memory>
#include <vector>

#include "apps/engine/engine.h"
#include "core/device/cpu/memory.h"
#include "core/device/runtime.h"
#include "core/io/staging.h"

namespace nrl::train {

/// As Staging it reads the copy instead of the engine's memory, by the addresses there.
class Snapshot final : public Staging {
 public:
  /// Allocates the memory: of a GPU run page-locked. `optimizer`: with the state. The engine must outlive the
  /// object. Fails with Exit::out_of_memory.
  Snapshot(engine::Engine& engine, bool optimizer);

  /// Copies what this rank saves. On a CPU it is done on return; on a GPU in a stream of its own: the next
  /// update of the engine waits for it. No save may read meanwhile.
  void take();
  /// Waits until the copy is complete. A thread of its own must be bound to the device.
  void wait() const;

  /// The copy of `bytes` bytes at this address of the engine's memory, all of them in the snapshot.
  void* at(const void* data, int64_t bytes) const;
  int64_t bytes() const { return bytes_; }

  size_t piece_bytes() const override { return size_t{1} << 40; }
  void read_ahead(std::vector<MemoryRange> ranges) override;
  const void* next() override;
  void* buffer() override;
  void write(void* to, size_t bytes) override;
  void finish() override {}

 private:
  struct Range {
    const std::byte* from;
    int64_t bytes;
    int64_t at;  // in the copy
  };
  void add(const Tensor& tensor, int64_t begin, int64_t bytes);

  engine::Engine& engine_;
  std::vector<Range> ranges_;      // in the order of the copies
  std::vector<Range> by_address_;  // the same, ascending
  size_t scales_ = 0;              // the first ones: the next pass writes them
  int64_t bytes_ = 0;
  cpu::HostMemory host_;
  device::Memory pinned_;
  std::byte* memory_ = nullptr;
  device::Stream stream_;
  device::Event begun_, copied_;
  std::vector<MemoryRange> reads_;
  size_t read_ = 0;
};

}  // namespace nrl::train
