#pragma once
// Two pinned buffers between device memory and the host, with a stream of their own.

#include <span>
#include <vector>

#include "core/device/runtime.h"
#include "core/io/staging.h"

namespace nrl::engine {

/// Transfers are ordered after the work that was in `stream` at construction; finish() must precede work
/// that uses what was written. Another thread than the constructor's may use it if bound to the device.
class PinnedStaging final : public Staging {
 public:
  /// `pinned`: two buffers of equal size, in page-locked memory. `host`: memory that the host can access
  /// (memory::Tier::host), to and from which it copies itself. Everything must outlive this object.
  PinnedStaging(device::Runtime& device, device::StreamHandle stream, std::span<std::byte> pinned,
                std::span<const std::byte> host = {});
  /// Waits for the transfers.
  ~PinnedStaging() override;

  size_t piece_bytes() const override { return piece_; }
  void read_ahead(std::vector<MemoryRange> ranges) override;
  const void* next() override;
  void* buffer() override;
  void write(void* to, size_t bytes) override;
  void finish() override { stream_.synchronize(); }

 private:
  std::byte* buffer_of(size_t piece) const { return pinned_.data() + piece % 2 * piece_; }
  void fetch(size_t piece);
  bool on_host(const void* p) const;

  device::Runtime& device_;
  std::span<std::byte> pinned_;
  std::span<const std::byte> host_;
  size_t piece_;
  device::Stream stream_;
  device::Event begun_;              // after the work before this object
  device::Event transferred_[2];     // by buffer
  std::vector<MemoryRange> ranges_;  // to be read
  size_t fetched_ = 0, read_ = 0;    // of ranges_
  size_t written_ = 0;
};

}  // namespace nrl::engine
