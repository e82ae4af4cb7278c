#pragma once
// Copies between the memory that ops compute on and the host's, beside the computation. On a GPU they run on
// two streams of their own, one per direction; events order them and the stream of the ops. On a CPU they are
// made at once, by the threads of the ops.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/device/runtime.h"

namespace nrl::memory {

struct HostCopy {
  void* to = nullptr;
  const void* from = nullptr;
  size_t bytes = 0;
};

/// What was copied since HostCopies::take_statistics().
struct HostCopyStatistics {
  int64_t to_host = 0, from_host = 0;  ///< bytes
  double seconds = 0;                  ///< CPU: that copies took
};

class HostCopies {
 public:
  HostCopies() = default;
  /// `device`: null on a CPU, which copies with `threads`. `compute`: the stream of the ops. The device must
  /// outlive this object.
  HostCopies(device::Runtime* device, device::StreamHandle compute, int threads);

  /// Copies started together.
  using Ticket = int;
  /// Starts copies after all work enqueued for the ops so far.
  Ticket start(std::span<const HostCopy> copies, device::CopyKind kind);
  /// Work enqueued for the ops from now on starts after these copies. Does not block the host.
  void finish(Ticket ticket);

  HostCopyStatistics take_statistics();

 private:
  struct Pending {
    device::Event begin, end;
    bool used = false;
  };
  std::vector<Pending>::iterator unused();

  device::Runtime* device_ = nullptr;
  device::StreamHandle compute_ = nullptr;
  int threads_ = 1;
  device::Stream to_host_, from_host_;
  std::vector<Pending> pending_;
  HostCopyStatistics statistics_;
};

}  // namespace nrl::memory
