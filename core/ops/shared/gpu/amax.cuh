#pragma once
// The largest magnitude of what a kernel writes; included by cuda.cu files alone.

#include "core/device/kernel.h"

namespace nrl::ops::NRL_GPU {
namespace {

/// The larger of amax and |v|, as bits: NaN is above everything and stays.
__device__ __forceinline__ unsigned max_magnitude(unsigned amax, float v) {
  return max(amax, __float_as_uint(v) & 0x7fffffffu);
}

template <int N>
__device__ __forceinline__ void add_magnitudes(unsigned& amax, const float (&v)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) amax = max_magnitude(amax, v[i]);
}

/// *out = max(*out, the block's largest `amax`), the same in any order of the blocks. All threads
/// must call it.
template <class T>
__device__ __forceinline__ void combine_amax(unsigned* out, unsigned amax) {
  NRL_SHARED(unsigned, warp_amax, [32]);
#pragma unroll
  for (int o = kernel::warp / 2; o; o >>= 1) amax = max(amax, __shfl_xor_sync(kernel::all_lanes, amax, o));
  const int lane = threadIdx.x % kernel::warp, warps = blockDim.x / kernel::warp;
  if (lane == 0) warp_amax[threadIdx.x / kernel::warp] = amax;
  __syncthreads();
  if (threadIdx.x >= kernel::warp) return;
  amax = lane < warps ? warp_amax[lane] : 0;
#pragma unroll
  for (int o = kernel::warp / 2; o; o >>= 1) amax = max(amax, __shfl_xor_sync(kernel::all_lanes, amax, o));
  // Rounding keeps the order, so the largest rounded value is the rounded largest value.
  if (lane == 0) atomicMax(out, __float_as_uint(static_cast<float>(T(__uint_as_float(amax)))));
}

}  // namespace
}  // namespace nrl::ops::NRL_GPU
