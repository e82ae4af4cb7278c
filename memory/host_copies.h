#pragma once
// Copies between the memory that ops compute on and Tier::host, beside the computation. On a GPU they run on
// two streams of their own, one per direction; events order them and the stream of the ops. On a CPU the
// threads of the ops make them, and the system reads and writes the file behind Tier::host in the meantime:
// what goes to the host is copied when it is started, what comes back when it is finished.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "memory/plan.h"

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
  /// `device`: null on a CPU, which copies with `threads`. `compute`: the stream of the ops. `arenas` have
  /// the memory. The device and the arenas must outlive this object, if anything is copied.
  HostCopies(device::Runtime* device, device::StreamHandle compute, int threads, const Arenas& arenas);

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
    std::vector<HostCopy> late;  // CPU: to make in finish()
    bool used = false;
  };
  std::vector<Pending>::iterator unused();
  void copy(std::span<const HostCopy> copies, device::CopyKind kind);

  device::Runtime* device_ = nullptr;
  const Arenas* arenas_ = nullptr;
  device::StreamHandle compute_ = nullptr;
  int threads_ = 1;
  device::Stream to_host_, from_host_;
  std::vector<Pending> pending_;
  HostCopyStatistics statistics_;
};

}  // namespace nrl::memory
