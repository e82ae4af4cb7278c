#pragma once
// The execution context of ops: the device's kernel table, the threads, and scratch memory from the plan.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/tensor/tensor.h"

namespace nrl::device {
class Runtime;
}

namespace nrl::ops {

/// Row reductions use a fixed number of blocks on every GPU, so that results are bitwise identical across
/// GPUs and the plan knows the workspace without a device. A kernel of which `resident` blocks fit on a
/// multiprocessor uses resident * gpu_multiprocessors of them, one wave on an H100 or H200, and at most
/// gpu_partials. Waves, and how evenly they load the multiprocessors, with 4 resident blocks:
///
///                multiprocessors   waves   blocks: mean, most   balance
///   A100                     108    1.22      4.9, 5              98 %
///   H100, H200               132    1.00      4.0, 4             100 %
///   B200                     148    0.89      3.6, 4              89 %
inline constexpr int gpu_multiprocessors = 132, gpu_partials = 4 * gpu_multiprocessors;

struct KernelTable;
class KernelSet;
struct Libraries;
struct Call;
struct Cost;

/// Scratch memory of an op: a stack of bytes from the plan's workspace arena, in the memory of the device.
/// Its contents do not survive the call.
struct Workspace {
  std::byte* data = nullptr;
  size_t size = 0;
};

/// The execution context of one rank's device. Not thread-safe: one op at a time.
struct Exec {
  /// Filled by cpu_kernels() or a GPU's table; must not be null when an op runs.
  const KernelTable* kernels = nullptr;
  int threads = 1;           ///< CPU: threads an op may use
  int reduction_blocks = 0;  ///< GPU: gpu_partials; 0 on the CPU
  Workspace workspace = {};  ///< at least what every call takes: workspace() of its arguments
  void* stream = nullptr;    ///< GPU: the device::StreamHandle that ops are enqueued on; null on the CPU
  device::Runtime* device = nullptr;  ///< GPU: where the tensors live; null on the CPU
  int multiprocessors = 0;            ///< GPU: of the device, for grid sizes
  Libraries* libraries = nullptr;     ///< GPU: GEMM and attention (libraries.h)
  /// Not null: ops only add the kernels that they would call, and compute nothing on tensors. They ask the
  /// libraries for the plans of their arguments and note the choice (libraries.h); autotuning times plans on
  /// a stream of its own.
  KernelSet* needed = nullptr;
  std::vector<Call>* calls = nullptr;  ///< with `needed`: ops add their calls with their costs (cost.h)
  int step = -1;                       ///< index of the program's step that is executed; -1: none
  int microbatch = -1;                 ///< of that step in training; -1: of none
  int pieces = 1;                      ///< GEMMs on parts of the rows, of which the next one is
  size_t* scratch = nullptr;  ///< with `needed`: ops raise it to the workspace that they take (cost.h)

  bool on_gpu() const { return reduction_blocks > 0; }
  /// Partial sums that a reduction over rows may use: one per block on a GPU, one per thread on the CPU.
  int partials() const { return on_gpu() ? reduction_blocks : threads; }
};

}  // namespace nrl::ops
