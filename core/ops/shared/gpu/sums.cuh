#pragma once
// Sums in f64, in an order that does not depend on the GPU.

#include "core/device/kernel.h"

namespace nrl::ops::NRL_GPU {

/// Sum over the block, in thread 0. Every thread must call it; blockDim.x is a multiple of 32, the block is
/// one-dimensional.
__device__ __forceinline__ double block_sum_double(double v) {
  using namespace kernel;
  NRL_SHARED(double, part, [32]);
  const int lane = threadIdx.x % warp, w = threadIdx.x / warp, warps = blockDim.x / warp;
#pragma unroll
  for (int o = warp / 2; o; o >>= 1) v += __shfl_xor_sync(all_lanes, v, o);
  if (lane == 0) part[w] = v;
  __syncthreads();
  v = 0.0;
  if (threadIdx.x == 0)
    for (int i = 0; i < warps; ++i) v += part[i];
  __syncthreads();
  return v;
}

}  // namespace nrl::ops::NRL_GPU
