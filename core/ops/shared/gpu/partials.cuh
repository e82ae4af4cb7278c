#pragma once
// Gradients of one or two vectors of weights: every block writes its sums over rows (=, workspace), and
// add_partials_kernel adds them to the gradients (+=) in the order of the blocks.

#include "core/ops/shared/gpu/rows.cuh"

namespace nrl::ops::NRL_GPU {

/// Sums over rows, one pair of vectors for each block: (blocks, 2, d) f32 in exec.workspace.
struct Partials {
  float* data = nullptr;
  int64_t d = 0;
  __device__ __forceinline__ float* of(int64_t block, int which) const {
    return data + (block * 2 + which) * d;
  }
};

/// Blocks, and so partial sums, of a reduction of which `resident` blocks share a multiprocessor: one wave on
/// the GPUs that gpu_partials was chosen for, and the same number on all others.
inline int64_t partial_blocks(const Exec& exec, int resident) {
  return min(static_cast<int64_t>(exec.partials()), static_cast<int64_t>(resident) * gpu_multiprocessors);
}

inline constexpr int partial_columns = kernel::warp, partial_slices = 16;

/// out[which] += the sum over blocks, in an order that depends on their number only. A block has 32 columns;
/// its warps each add every slices-th partial. A template, so that several files may include it.
template <int slices>
__global__ void __launch_bounds__(partial_columns* slices)
    add_partials_kernel(Partials partials, int blocks, float* first, float* second) {
  NRL_SHARED(float, sums, [slices][partial_columns]);
  const int which = static_cast<int>(blockIdx.y);
  float* out = which == 0 ? first : second;
  if (!out) return;
  const int lane = threadIdx.x % partial_columns, slice = threadIdx.x / partial_columns;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * partial_columns + lane;
  float sum = 0;
  if (column < partials.d) {
#pragma unroll 8
    for (int b = slice; b < blocks; b += slices) sum += partials.of(b, which)[column];
  }
  sums[slice][lane] = sum;
  __syncthreads();
  if (slice > 0 || column >= partials.d) return;
  sum = 0;
#pragma unroll
  for (int s = 0; s < slices; ++s) sum += sums[s][lane];
  out[column] += sum;
}

/// Adds the partials of `blocks` blocks to `first` and `second` ((d) f32, either may be null).
inline void add_partials(Exec& exec, const Partials& partials, int blocks, float* first, float* second) {
  const auto columns = static_cast<unsigned>((partials.d + partial_columns - 1) / partial_columns);
  NRL_LAUNCH((add_partials_kernel<partial_slices>), dim3(columns, second ? 2 : 1),
             partial_columns * partial_slices, 0, exec.stream, partials, blocks, first, second);
}

/// The groups of a block add up their sums over rows and write them as the block's partial. `sums` holds
/// groups x d floats of shared memory, of which this thread's group has filled row group.index().
__device__ __forceinline__ void write_partial(const float* sums, int groups, int64_t d, float* out) {
  __syncthreads();
  for (int64_t i = threadIdx.x; i < d; i += blockDim.x) {
    float sum = 0;
    for (int g = 0; g < groups; ++g) sum += sums[g * d + i];
    out[i] = sum;
  }
  __syncthreads();
}

}  // namespace nrl::ops::NRL_GPU
