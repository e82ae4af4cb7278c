#pragma once
// The forward kernel of simt.cuh, which has the formulas, for bf16 on tensor cores; included by cuda.cu
// alone. Scores, softmax and all sums are f32, P is rounded to bf16 for the second GEMM, as in every fused
// attention.
//
// Four warps share a block; each owns 16 or 32 queries, whose scores and outputs stay in registers. K and V
// have a tile each: V arrives during Q K^T, the next K during softmax and P V. Softmax works on base-2
// exponents. Blocks are launched with the last queries first, which see the most keys, and the heads of a key
// head side by side, which read the same keys.
//
//   D    queries  keys  shared KB  blocks per SM  ldmatrix per mma
//   64     128     48       28            3            0.33
//   96     128     64       48            2            0.31
//   128    128     48       56            2            0.33
//   192     64     64       72            2            0.56
//   256     64     64       96            2            0.56
// An mma is 2,048 multiply-adds; a Hopper SM does 2,048 a cycle at most and about 60 % of them through
// mma.sync. An ldmatrix takes 4 cycles of shared memory. With 16 queries per warp and Q in registers, 0.5 per
// mma, shared memory would be the bound; 32 queries need 0.33 although Q is read again for every tile of
// keys. Above D 128 their sums do not fit into registers, and with 64 keys at D 64 and 128 neither.

#include "core/ops/attention/flash/mma.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

template <int D, bool Dropped>
struct ForwardTiles {
  static constexpr int warps = 4, threads = warps * kernel::warp;
  static constexpr int row_tiles = D <= (Dropped ? 64 : 128) ? 2 : 1;  ///< of 16 queries, per warp
  static constexpr int warp_rows = 16 * row_tiles, rows = warps * warp_rows,
                       keys = row_tiles == 2 && D != 96 ? 48 : 64;
  static constexpr int blocks = D == 64 && !Dropped ? 3 : 2;  ///< per multiprocessor
  static constexpr size_t mask_bytes = Dropped ? rows * keys / attention::keys_per_block : 0;
  static constexpr size_t shared = static_cast<size_t>(rows + 2 * keys) * D * sizeof(bf16) + mask_bytes;
};

/// One row's part of the softmax over a tile of scores: sc(n, c) are replaced by probabilities relative to
/// the new maximum. Returns what earlier sums are multiplied by.
template <int N>
__device__ __forceinline__ float softmax_row(float (*score)[4], int half, float scale_log2, float& row_max,
                                             float& row_sum) {
  float tile_max = row_max;
#pragma unroll
  for (int n = 0; n < N; ++n) tile_max = fmaxf(tile_max, fmaxf(score[n][2 * half], score[n][2 * half + 1]));
  tile_max = quad_max(tile_max);
  // No key seen yet: the difference of infinities would be NaN.
  const float shift = tile_max == -INFINITY ? 0.0f : tile_max * scale_log2;
  const float rescale = nrl_exp2(row_max * scale_log2 - shift);
  row_max = tile_max;
  float sum = 0;
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int c = 2 * half; c < 2 * half + 2; ++c) {
      score[n][c] = nrl_exp2(score[n][c] * scale_log2 - shift);
      sum += score[n][c];
    }
  row_sum = row_sum * rescale + sum;
  return rescale;
}

/// D: the head dimension rounded up. Dropped: with dropout of the probabilities.
template <int D, bool Dropped>
__global__ void __launch_bounds__(ForwardTiles<D, Dropped>::threads, ForwardTiles<D, Dropped>::blocks)
    mma_forward_kernel(FlashArguments<bf16> a) {
  using Tiles = ForwardTiles<D, Dropped>;
  constexpr int tile = Tiles::keys, row_tiles = Tiles::row_tiles, pairs = tile / 16;
  const Sequence s(a, static_cast<int>(blockIdx.z));
  const int head = static_cast<int>(blockIdx.x),
            q0 = static_cast<int>(gridDim.y - 1 - blockIdx.y) * Tiles::rows;
  if (q0 >= s.queries) return;
  NRL_DYN_SHARED(bf16, memory);
  bf16 *const q = memory, *const k = q + Tiles::rows * D, *const v = k + tile * D;
  [[maybe_unused]] auto* const mask = reinterpret_cast<unsigned char*>(v + tile * D);
  const auto own_row = [] { return warp_id() * Tiles::warp_rows; };
  const float scale_log2 = a.scale * log2_e;
  float out[row_tiles][D / 8][4] = {}, row_max[row_tiles][2], row_sum[row_tiles][2] = {};
#pragma unroll
  for (int m = 0; m < row_tiles; ++m) row_max[m][0] = row_max[m][1] = -INFINITY;

  int begin, end;
  key_range(a, s, q0, Tiles::rows, tile, begin, end);
  copy_tile<D, Tiles::rows, Tiles::threads>(q, a.q, s.q_begin, head, q0, s.queries, a.d);
  if (begin < end) copy_tile<D, tile, Tiles::threads>(k, a.k, s.k_begin, head / a.group, begin, s.keys, a.d);
  nrl_cp_async_commit();

  for (int k0 = begin; k0 < end; k0 += tile) {
    const VisibleKeys visible(a, s, q0 + own_row(), Tiles::warp_rows);
    const bool seen = q0 + own_row() < s.queries && visible.any(k0, tile), masked = !visible.all(k0, tile);
    nrl_cp_async_wait<0>();
    __syncthreads();  // K is there, V and the mask are not read any more
    copy_tile<D, tile, Tiles::threads>(v, a.v, s.k_begin, head / a.group, k0, s.keys, a.d);
    nrl_cp_async_commit();
    if constexpr (Dropped) a.mask.template draw<Tiles::rows, tile>(mask, s, q0, head, k0);
    float score[row_tiles][2 * pairs][4] = {};
    if (seen)
      gemm<D, row_tiles, 1, pairs, 1>(score, Fragments<D, Operand::a, false>(q, warp_id() * row_tiles, 0),
                                      Fragments<D, Operand::b, false>(k, 0, 0));
    nrl_cp_async_wait<0>();
    __syncthreads();  // V is there, K is not read any more
    if (k0 + tile < end)
      copy_tile<D, tile, Tiles::threads>(k, a.k, s.k_begin, head / a.group, k0 + tile, s.keys, a.d);
    nrl_cp_async_commit();
    if (!seen) continue;
    const int g = lane_id() / 4, t = lane_id() % 4;
    if (masked) {
#pragma unroll
      for (int m = 0; m < row_tiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const VisibleKeys of_row(a, s, q0 + own_row() + m * 16 + half * 8 + g, 1);
#pragma unroll
          for (int n = 0; n < 2 * pairs; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              const int key = k0 + n * 8 + 2 * t + c;
              if (key < of_row.first || key > of_row.last) score[m][n][2 * half + c] = -INFINITY;
            }
        }
    }
    float rescale[row_tiles][2];
    bool changed = false;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rescale[m][half] =
            softmax_row<2 * pairs>(score[m], half, scale_log2, row_max[m][half], row_sum[m][half]);
        changed |= rescale[m][half] != 1.0f;
        if constexpr (Dropped) {
#pragma unroll
          for (int n = 0; n < 2 * pairs; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c)
              if (!kept<tile>(mask, own_row() + m * 16 + half * 8 + g, n * 8 + 2 * t + c))
                score[m][n][2 * half + c] = 0;
        }
      }
    // Most tiles have no new maximum.
    if (__any_sync(kernel::all_lanes, changed)) {
#pragma unroll
      for (int m = 0; m < row_tiles; ++m)
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
#pragma unroll
          for (int c = 0; c < 4; ++c) out[m][n][c] *= rescale[m][c / 2];
    }
    const Fragments<D, Operand::b, true> v_rows(v, 0, 0);
#pragma unroll
    for (int i = 0; i < pairs; ++i) {
      unsigned p[row_tiles][4];
#pragma unroll
      for (int m = 0; m < row_tiles; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          p[m][e] = pack_bf16(score[m][2 * i + e / 2][e % 2 * 2], score[m][2 * i + e / 2][e % 2 * 2 + 1]);
#pragma unroll
      for (int n = 0; n < D / 16; ++n) {
        unsigned fv[2][2];
        v_rows.load(fv[0], i, n);
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) nrl_mma_m16n8k16<bf16, 2>(out[m] + 2 * n, p[m], fv);
      }
    }
  }
  nrl_cp_async_wait<0>();

  const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
  for (int m = 0; m < row_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(row_sum[m][half]);
      const int row = q0 + own_row() + m * 16 + half * 8 + g;
      const float inverse = sum == 0 ? 0.0f : (Dropped ? a.mask.scale : 1.0f) / sum;
      store_row<D / 16, 1>(a.out(s.q_begin + row, head), row < s.queries, a.d, out[m], half, 0, inverse);
      if (t == 0 && row < s.queries && a.lse)
        a.lse[head * a.lse_step + s.q_begin + row] =
            sum == 0 ? -INFINITY : row_max[m][half] * a.scale + logf(sum);
    }
}

void mma_forward(Exec& exec, const AttentionForward& a) {
  const FlashArguments<bf16> f = flash_arguments<bf16>(a);
  with_rounded_d(f.d, [&](auto rounded) {
    constexpr int D = decltype(rounded)::value;
    with_dropout(f.mask, [&](auto dropped) {
      constexpr bool Dropped = decltype(dropped)::value;
      using Tiles = ForwardTiles<D, Dropped>;
      NRL_LAUNCH((mma_forward_kernel<D, Dropped>),
                 dim3(static_cast<unsigned>(a.q.dim(1)), flash_blocks(a, Tiles::rows), flash_sequences(a)),
                 Tiles::threads, Tiles::shared, exec.stream, f);
    });
  });
}

}  // namespace
}  // namespace nrl::ops::NRL_GPU
