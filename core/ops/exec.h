#pragma once
// What an op runs with: the kernel table of the device, the threads, and scratch memory from the plan.

#include <cstddef>
#include <cstdint>

#include "core/tensor/tensor.h"

namespace nrl::device {
class Runtime;
}

namespace nrl::ops {

/// Sums over rows are split among this many blocks on every GPU: the order of additions, and with it the
/// bits, do not depend on the device, and the plan needs no device to know the workspace.
inline constexpr int gpu_partials = 256;

struct KernelTable;
class KernelSet;
struct Libraries;

/// Scratch memory of an op: a stack of bytes from the plan's workspace arena, in the memory of the device.
/// Nothing survives the call.
struct Workspace {
  std::byte* data = nullptr;
  size_t size = 0;
};

/// The execution context of one rank's device. Not thread-safe: one op at a time.
struct Exec {
  const KernelTable* kernels =
      nullptr;  ///< filled by cpu_kernels() or a GPU's table; never null when an op runs
  /// CPU: threads an op may use. GPU: gpu_partials, the blocks among which sums over rows are split.
  int threads = 1;
  Workspace workspace = {};  ///< at least workspace_bytes() of every op that runs (see each op's header)
  void* stream = nullptr;    ///< GPU: the device::StreamHandle that ops are enqueued on; null on the CPU
  device::Runtime* device = nullptr;  ///< GPU: where the tensors live; null on the CPU
  int multiprocessors = 0;            ///< GPU: of the device, for grid sizes
  Libraries* libraries = nullptr;     ///< GPU: matrix product and attention (libraries.h)
  /// Not null: ops compute nothing and enqueue nothing, they only add the kernels that they would call.
  KernelSet* needed = nullptr;
};

}  // namespace nrl::ops
