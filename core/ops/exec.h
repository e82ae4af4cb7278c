#pragma once
// What an op runs with: the kernel table of the device, the threads, and scratch memory from the plan.

#include <cstddef>
#include <cstdint>

#include "core/tensor/tensor.h"

namespace nrl::ops {

struct KernelTable;

/// Scratch memory of an op: a stack of bytes from the plan's workspace arena. Nothing survives the call.
struct Workspace {
  std::byte* data = nullptr;
  size_t size = 0;
};

/// The execution context of one rank's device. Not thread-safe: one op at a time.
struct Exec {
  const KernelTable* kernels = nullptr;  ///< filled by cpu_kernels() (or the CUDA twin); never null when an op runs
  int threads = 1;                       ///< CPU: threads an op may use
  Workspace workspace;                   ///< at least workspace_bytes() of every op that runs (see each op.h)
  void* stream = nullptr;                ///< CUDA: cudaStream_t that the op is enqueued on; null on the CPU
};

}  // namespace nrl::ops
