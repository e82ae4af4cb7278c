// Sums over segments on the GPU; formulas in core/ops/segments.h.
//
// sum_kernel   a block per segment; writes out (=). It goes through all rows in tiles of one row per thread.
//              The segment's rows are counted, and row number i of the segment is added by thread i %
//              threads: sums do not depend on where the segment's rows are.
// rows_kernel  a thread per row; writes out (=)

#include "core/device/kernel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/gpu/sums.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

using namespace kernel;

constexpr int threads = 256, warps = threads / warp;

__global__ void __launch_bounds__(threads)
    sum_kernel(const float* __restrict__ x, const float* __restrict__ minus, const int* __restrict__ target,
               const int* __restrict__ segment, int64_t n, double* out) {
  NRL_SHARED(double, numbers, [threads]);
  NRL_SHARED(int, counts, [warps]);
  const int t = static_cast<int>(threadIdx.x), lane = t % warp, w = t / warp;
  const int own = static_cast<int>(blockIdx.x);
  double sum = 0;
  int seen = 0;  // rows of the segment in earlier tiles
  for (int64_t begin = 0; begin < n; begin += threads) {
    const int64_t row = begin + t;
    const bool member = row < n && segment[row] == own && target[row] >= 0;
    const unsigned members = __ballot_sync(all_lanes, member);
    if (lane == 0) counts[w] = __popc(members);
    // All threads have read the last tile's numbers, and behind the next barrier its counts.
    const int total = __syncthreads_count(member);
    if (total == 0) continue;
    if (member) {
      int place = __popc(members & ((1u << lane) - 1));
      for (int i = 0; i < w; ++i) place += counts[i];
      numbers[place] = static_cast<double>(x[row]) - (minus ? static_cast<double>(minus[row]) : 0.0);
    }
    __syncthreads();
    const int mine = (t - seen % threads + threads) % threads;
    if (mine < total) sum += numbers[mine];
    seen += total;
  }
  sum = block_sum_double(sum);
  if (t == 0) out[own] = sum;
}

__global__ void __launch_bounds__(threads)
    rows_kernel(const double* __restrict__ values, int64_t segments, const int* __restrict__ target,
                const int* __restrict__ segment, int64_t n, float* __restrict__ out) {
  const int64_t row = int64_t{blockIdx.x} * threads + threadIdx.x;
  if (row >= n) return;
  const int s = segment[row];
  out[row] = target[row] < 0 || s < 0 || s >= segments ? 0.0f : static_cast<float>(values[s]);
}

void segment_sum_launch(Exec& exec, const SegmentSum& a) {
  NRL_LAUNCH(sum_kernel, static_cast<unsigned>(a.out.numel()), threads, 0, exec.stream,
             static_cast<const float*>(a.x.data), static_cast<const float*>(a.minus.data),
             static_cast<const int*>(a.target.data), static_cast<const int*>(a.segment.data), a.x.numel(),
             static_cast<double*>(a.out.data));
}

void segment_rows_launch(Exec& exec, const SegmentRows& a) {
  const int64_t n = a.out.numel();
  NRL_LAUNCH(rows_kernel, blocks_for(n, threads), threads, 0, exec.stream,
             static_cast<const double*>(a.values.data), a.values.numel(),
             static_cast<const int*>(a.target.data), static_cast<const int*>(a.segment.data), n,
             static_cast<float*>(a.out.data));
}

}  // namespace

void fill_segments(KernelTable& table) {
  table.segment_sum = segment_sum_launch;
  table.segment_rows = segment_rows_launch;
}

}  // namespace nrl::ops::NRL_GPU
