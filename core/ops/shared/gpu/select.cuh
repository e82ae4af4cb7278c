#pragma once
// Selection of the largest numbers by a block of threads, in the order in which they lie.

#include "core/device/kernel.h"

namespace nrl::ops::NRL_GPU {

/// Which numbers are among the largest: those above `order`, and of those at it the first `equals`.
struct Limit {
  unsigned order;
  int equals;
};

/// The limit of the `count` largest of all that for_orders(each) gives, where every thread of the block calls
/// each(order) for its part. Finds the order of the last one digit by digit, from counts of the numbers that
/// agree in the digits before. If there are fewer, the order is 0. All threads must call it.
template <int threads, class ForOrders>
__device__ __forceinline__ Limit limit_of(const ForOrders& for_orders, int count) {
  constexpr int digit_bits = 8, digits = 1 << digit_bits;
  NRL_SHARED(int, counts, [digits]);
  NRL_SHARED(int, found, [2]);  // the digit, and how many numbers with it are selected
  const int thread = static_cast<int>(threadIdx.x);
  Limit limit{0, count};
  unsigned known = 0;  // bits of the digits before
  for (int shift = 32 - digit_bits; shift >= 0; shift -= digit_bits) {
    for (int d = thread; d < digits; d += threads) counts[d] = 0;
    __syncthreads();
    for_orders([&](unsigned order) {
      if ((order & known) == limit.order) atomicAdd(&counts[order >> shift & (digits - 1)], 1);
    });
    __syncthreads();
    if (thread == 0) {
      int d = digits - 1, left = limit.equals;
      for (; d > 0 && counts[d] < left; --d) left -= counts[d];
      found[0] = d;
      found[1] = left;
    }
    __syncthreads();
    limit.order |= static_cast<unsigned>(found[0]) << shift;
    limit.equals = found[1];
    known |= static_cast<unsigned>(digits - 1) << shift;
  }
  return limit;
}

/// Returns `total` plus the sum of `count` over the threads before this one, and adds the sum over all
/// threads to `total`. `of_warps` is shared memory that no thread uses from the barrier before on. All
/// threads must call it.
template <int warps>
__device__ __forceinline__ int sum_before(int count, int (&of_warps)[warps], int& total) {
  const int lane = static_cast<int>(threadIdx.x) % kernel::warp,
            w = static_cast<int>(threadIdx.x) / kernel::warp;
  int sum = count;
#pragma unroll
  for (int o = 1; o < kernel::warp; o <<= 1) {
    const int below = __shfl_up_sync(kernel::all_lanes, sum, o);
    if (lane >= o) sum += below;
  }
  if (lane == kernel::warp - 1) of_warps[w] = sum;
  __syncthreads();
  int before = total + sum - count;
  for (int j = 0; j < warps; ++j) {
    if (j < w) before += of_warps[j];
    total += of_warps[j];
  }
  return before;
}

}  // namespace nrl::ops::NRL_GPU
