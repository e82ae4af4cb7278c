#pragma once
// The kernels of simt.cuh, which has the formulas, for bf16 on tensor cores, included by cuda.cu alone: head
// dimensions that are multiples of 16, rows that are 16-byte aligned. Scores, softmax and all sums are f32; P
// and dS are rounded to bf16 for the second GEMM, as in every fused attention. Deterministic: one warp owns
// each row of dq, dk and dv and adds in ascending order.
//
// Each block handles 64 rows (16 per warp) and iterates over tiles of 64 rows of the other side. Fragments as
// in the PTX manual, mma.m16n8k16: lane 4 g + t holds rows g and g + 8 and column pairs 2 t and 2 t + 8.

#include "core/ops/attention/flash/simt.cuh"
#include "core/ops/shared/gpu/rows.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

constexpr int mma_warps = 4, mma_threads = mma_warps * kernel::warp, mma_rows = mma_warps * 16;
constexpr int mma_tile = 64;
constexpr size_t mma_mask_bytes = mma_rows * mma_tile / attention::keys_per_block;

/// Elements between rows in shared memory, padded by 16 bytes: the 32 lanes of a fragment then hit 32 banks.
template <int D>
constexpr int mma_stride = D + 8;

__device__ __forceinline__ unsigned pair_at(const bf16* p) {
  unsigned u;
  memcpy(&u, static_cast<const void*>(p), sizeof u);
  return u;
}
__device__ __forceinline__ unsigned pair_of(bf16 low, bf16 high) {
  return static_cast<unsigned>(low.bits) | static_cast<unsigned>(high.bits) << 16;
}

/// 16 x 16 of a matrix whose rows lie in shared memory.
template <int Stride>
__device__ __forceinline__ void load_a(unsigned* f, const bf16* at, int g, int t) {
  const bf16* p = at + g * Stride + 2 * t;
  f[0] = pair_at(p);
  f[1] = pair_at(p + 8 * Stride);
  f[2] = pair_at(p + 8);
  f[3] = pair_at(p + 8 * Stride + 8);
}
/// 16 x 8 of the transpose of such a matrix: 8 of its rows.
template <int Stride>
__device__ __forceinline__ void load_b_transposed(unsigned* f, const bf16* at, int g, int t) {
  const bf16* p = at + g * Stride + 2 * t;
  f[0] = pair_at(p);
  f[1] = pair_at(p + 8);
}
/// 16 x 8 of the matrix itself.
template <int Stride>
__device__ __forceinline__ void load_b(unsigned* f, const bf16* at, int g, int t) {
  const bf16* p = at + 2 * t * Stride + g;
  f[0] = pair_of(p[0], p[Stride]);
  f[1] = pair_of(p[8 * Stride], p[9 * Stride]);
}
/// Two neighboring 16 x 8 accumulators as a 16 x 16 operand.
__device__ __forceinline__ void accumulators_as_a(unsigned* f, const float* left, const float* right) {
  f[0] = pack_bf16(left[0], left[1]);
  f[1] = pack_bf16(left[2], left[3]);
  f[2] = pack_bf16(right[0], right[1]);
  f[3] = pack_bf16(right[2], right[3]);
}

/// Rows [begin, begin + mma_rows) of a head into shared memory, zero behind the end of the sequence and
/// behind column d.
template <int D>
__device__ void load_rows(bf16* to, const HeadRows<bf16>& from, int64_t first, int head, int begin, int end,
                          int d) {
  constexpr int units = D / 8;
#pragma unroll 2  // more loads in flight would take registers that hold fragments
  for (int e = static_cast<int>(threadIdx.x); e < mma_tile * units; e += mma_threads) {
    const int r = e / units, c = e % units * 8;
    kernel::Pack<bf16> v;
    if (begin + r < end && c < d) v.load(from(first + begin + r, head) + c);
    v.store(to + r * mma_stride<D> + c);
  }
}

/// Reductions over the four lanes of a row.
__device__ __forceinline__ float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(kernel::all_lanes, v, 1));
  return fmaxf(v, __shfl_xor_sync(kernel::all_lanes, v, 2));
}
__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(kernel::all_lanes, v, 1);
  return v + __shfl_xor_sync(kernel::all_lanes, v, 2);
}

/// Writes rows `row` and `row + 8` of a warp's accumulators, columns [0, Columns * 8) from `column` on.
template <int Columns>
__device__ __forceinline__ void store_rows(const HeadRows<bf16>& to, int64_t first, int head, int row,
                                           int end, int column, int d, const float (*sums)[4],
                                           const float* factor, int t) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + 8 * half;
    if (r >= end) continue;
    bf16* const p = to(first + r, head) + column + 2 * t;
#pragma unroll
    for (int n = 0; n < Columns; ++n) {
      if (column + n * 8 >= d) break;
      const unsigned u = pack_bf16(sums[n][2 * half] * factor[half], sums[n][2 * half + 1] * factor[half]);
      memcpy(static_cast<void*>(p + n * 8), &u, sizeof u);
    }
  }
}

/// D: the head dimension rounded up. Dropped: with dropout of the probabilities.
template <int D, bool Dropped>
__global__ void __launch_bounds__(mma_threads) mma_forward_kernel(FlashArguments<bf16> a) {
  constexpr int smem_stride = mma_stride<D>, tiles = mma_tile / 8;
  const Sequence s(a, static_cast<int>(blockIdx.z));
  const int head = static_cast<int>(blockIdx.y), q0 = static_cast<int>(blockIdx.x) * mma_rows;
  if (q0 >= s.queries) return;
  NRL_DYN_SHARED(bf16, memory);
  bf16 *const q = memory, *const k = q + mma_rows * smem_stride, *const v = k + mma_tile * smem_stride;
  [[maybe_unused]] auto* const mask = reinterpret_cast<unsigned char*>(v + mma_tile * smem_stride);
  const int lane = static_cast<int>(threadIdx.x) % kernel::warp,
            own_row = static_cast<int>(threadIdx.x) / kernel::warp * 16, g = lane / 4, t = lane % 4,
            row = q0 + own_row + g;
  load_rows<D>(q, a.q, s.q_begin, head, q0, s.queries, a.d);
  float out[D / 8][4] = {}, row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {};
  int begin, end;
  key_range(a, s, q0, mma_rows, mma_tile, begin, end);
  for (int k0 = begin; k0 < end; k0 += mma_tile) {
    __syncthreads();
    load_rows<D>(k, a.k, s.k_begin, head / a.group, k0, s.keys, a.d);
    load_rows<D>(v, a.v, s.k_begin, head / a.group, k0, s.keys, a.d);
    if constexpr (Dropped) a.mask.template draw<mma_rows, mma_tile>(mask, s.q_begin + q0, head, k0);
    __syncthreads();
    float score[tiles][4] = {};
    unsigned fa[4], fb[2];
    for (int i = 0; i < a.d; i += 16) {
      load_a<smem_stride>(fa, q + own_row * smem_stride + i, g, t);
#pragma unroll
      for (int n = 0; n < tiles; ++n) {
        load_b_transposed<smem_stride>(fb, k + n * 8 * smem_stride + i, g, t);
        nrl_mma_m16n8k16_bf16<1>(&score[n], fa, &fb);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float tile_max = -INFINITY;
#pragma unroll
      for (int n = 0; n < tiles; ++n)
#pragma unroll
        for (int c = 2 * half; c < 2 * half + 2; ++c) {
          const bool seen = visible(a, s, row + 8 * half, k0 + n * 8 + 2 * t + c % 2);
          score[n][c] = seen ? score[n][c] * a.scale : -INFINITY;
          tile_max = fmaxf(tile_max, score[n][c]);
        }
      const float new_max = fmaxf(row_max[half], quad_max(tile_max));
      // No key seen yet: the difference of infinities would be NaN.
      const float rescale = new_max == -INFINITY ? 1.0f : __expf(row_max[half] - new_max);
      float tile_sum = 0;
#pragma unroll
      for (int n = 0; n < tiles; ++n)
#pragma unroll
        for (int c = 2 * half; c < 2 * half + 2; ++c) {
          score[n][c] = score[n][c] == -INFINITY ? 0.0f : __expf(score[n][c] - new_max);
          tile_sum += score[n][c];
          if constexpr (Dropped)
            if (!kept<mma_tile>(mask, own_row + g + 8 * half, n * 8 + 2 * t + c % 2)) score[n][c] = 0;
        }
      row_sum[half] = row_sum[half] * rescale + quad_sum(tile_sum);
      row_max[half] = new_max;
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        out[n][2 * half] *= rescale;
        out[n][2 * half + 1] *= rescale;
      }
    }
#pragma unroll
    for (int i = 0; i < tiles / 2; ++i) {
      accumulators_as_a(fa, score[2 * i], score[2 * i + 1]);
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        if (n * 8 >= a.d) break;
        load_b<smem_stride>(fb, v + i * 16 * smem_stride + n * 8, g, t);
        nrl_mma_m16n8k16_bf16<1>(&out[n], fa, &fb);
      }
    }
  }
  const float scale = Dropped ? a.mask.scale : 1.0f;
  const float inverse[2] = {row_sum[0] == 0 ? 0.0f : scale / row_sum[0],
                            row_sum[1] == 0 ? 0.0f : scale / row_sum[1]};
  store_rows<D / 8>(a.out, s.q_begin, head, row, s.queries, 0, a.d, out, inverse, t);
  if (t != 0 || !a.lse) return;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (row + 8 * half < s.queries)
      a.lse[head * a.lse_step + s.q_begin + row + 8 * half] =
          row_sum[half] == 0 ? -INFINITY : row_max[half] + logf(row_sum[half]);
}

/// A warp's 16 rows against 16 rows of the other side, for two pairs of matrices: score = own . other^T,
/// grad = own_2 . other_2^T.
template <int Stride>
__device__ __forceinline__ void two_gemms(float (*score)[4], float (*grad)[4], const bf16* own,
                                          const bf16* other, const bf16* own_2, const bf16* other_2, int d,
                                          int g, int t) {
  unsigned fa[4], ga[4], fb[2];
  for (int i = 0; i < d; i += 16) {
    load_a<Stride>(fa, own + i, g, t);
    load_a<Stride>(ga, own_2 + i, g, t);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      load_b_transposed<Stride>(fb, other + n * 8 * Stride + i, g, t);
      nrl_mma_m16n8k16_bf16<1>(&score[n], fa, &fb);
      load_b_transposed<Stride>(fb, other_2 + n * 8 * Stride + i, g, t);
      nrl_mma_m16n8k16_bf16<1>(&grad[n], ga, &fb);
    }
  }
}

template <int D, bool Dropped>
__global__ void __launch_bounds__(mma_threads) mma_dq_kernel(FlashArguments<bf16> a) {
  constexpr int smem_stride = mma_stride<D>;
  const Sequence s(a, static_cast<int>(blockIdx.z));
  const int head = static_cast<int>(blockIdx.y), q0 = static_cast<int>(blockIdx.x) * mma_rows;
  if (q0 >= s.queries) return;
  NRL_DYN_SHARED(bf16, memory);
  bf16 *const q = memory, *const dout = q + mma_rows * smem_stride, *const k = dout + mma_rows * smem_stride,
              *const v = k + mma_tile * smem_stride;
  [[maybe_unused]] auto* const mask = reinterpret_cast<unsigned char*>(v + mma_tile * smem_stride);
  const int lane = static_cast<int>(threadIdx.x) % kernel::warp,
            own_row = static_cast<int>(threadIdx.x) / kernel::warp * 16, g = lane / 4, t = lane % 4,
            row = q0 + own_row + g;
  load_rows<D>(q, a.q, s.q_begin, head, q0, s.queries, a.d);
  load_rows<D>(dout, a.dout, s.q_begin, head, q0, s.queries, a.d);
  float lse[2] = {}, delta[2] = {}, dq[D / 8][4] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (row + 8 * half < s.queries) {
      const int64_t at = s.q_begin + row + 8 * half;
      lse[half] = a.lse[head * a.lse_step + at];
      delta[half] = a.delta[head * a.queries + at];
    }
  int begin, end;
  key_range(a, s, q0, mma_rows, mma_tile, begin, end);
  for (int k0 = begin; k0 < end; k0 += mma_tile) {
    __syncthreads();
    load_rows<D>(k, a.k, s.k_begin, head / a.group, k0, s.keys, a.d);
    load_rows<D>(v, a.v, s.k_begin, head / a.group, k0, s.keys, a.d);
    if constexpr (Dropped) a.mask.template draw<mma_rows, mma_tile>(mask, s.q_begin + q0, head, k0);
    __syncthreads();
    for (int i = 0; i < mma_tile; i += 16) {
      float score[2][4] = {}, grad[2][4] = {};
      two_gemms<smem_stride>(score, grad, q + own_row * smem_stride, k + i * smem_stride,
                             dout + own_row * smem_stride, v + i * smem_stride, a.d, g, t);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const bool seen = visible(a, s, row + c / 2 * 8, k0 + i + n * 8 + 2 * t + c % 2);
          const float p = seen ? __expf(a.scale * score[n][c] - lse[c / 2]) : 0.0f;
          if constexpr (Dropped) {
            const bool stays = kept<mma_tile>(mask, own_row + g + c / 2 * 8, i + n * 8 + 2 * t + c % 2);
            grad[n][c] = stays ? grad[n][c] * a.mask.scale : 0.0f;
          }
          grad[n][c] = seen ? a.scale * p * (grad[n][c] - delta[c / 2]) : 0.0f;
        }
      unsigned fa[4], fb[2];
      accumulators_as_a(fa, grad[0], grad[1]);
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        if (n * 8 >= a.d) break;
        load_b<smem_stride>(fb, k + i * smem_stride + n * 8, g, t);
        nrl_mma_m16n8k16_bf16<1>(&dq[n], fa, &fb);
      }
    }
  }
  const float one[2] = {1, 1};
  store_rows<D / 8>(a.dq, s.q_begin, head, row, s.queries, 0, a.d, dq, one, t);
}

/// The block's rows are keys; it iterates over the queries of all heads that read them. A block computes
/// `Columns` columns of dk and dv, so that the sums stay in registers; blockIdx.x % (D / Columns) selects
/// them.
template <int D, int Columns, bool Dropped>
__global__ void __launch_bounds__(mma_threads) mma_dkv_kernel(FlashArguments<bf16> a) {
  constexpr int smem_stride = mma_stride<D>, parts = D / Columns;
  const Sequence s(a, static_cast<int>(blockIdx.z));
  const int kv_head = static_cast<int>(blockIdx.y), k0 = static_cast<int>(blockIdx.x) / parts * mma_rows,
            column = static_cast<int>(blockIdx.x) % parts * Columns;
  if (k0 >= s.keys || column >= a.d) return;
  NRL_DYN_SHARED(bf16, memory);
  bf16 *const k = memory, *const v = k + mma_rows * smem_stride, *const q = v + mma_rows * smem_stride,
              *const dout = q + mma_tile * smem_stride;
  float *const lse = reinterpret_cast<float*>(dout + mma_tile * smem_stride), *const delta = lse + mma_tile;
  [[maybe_unused]] auto* const mask = reinterpret_cast<unsigned char*>(delta + mma_tile);
  const int lane = static_cast<int>(threadIdx.x) % kernel::warp,
            own_row = static_cast<int>(threadIdx.x) / kernel::warp * 16, g = lane / 4, t = lane % 4,
            row = k0 + own_row + g;
  load_rows<D>(k, a.k, s.k_begin, kv_head, k0, s.keys, a.d);
  load_rows<D>(v, a.v, s.k_begin, kv_head, k0, s.keys, a.d);
  float dk[Columns / 8][4] = {}, dv[Columns / 8][4] = {};
  int64_t begin, end;
  query_range(a, s, k0, mma_rows, mma_tile, begin, end);
  for (int head = kv_head * a.group; head < (kv_head + 1) * a.group; ++head) {
    for (int64_t first = begin; first < end; first += mma_tile) {
      const int q0 = static_cast<int>(first);
      __syncthreads();
      load_rows<D>(q, a.q, s.q_begin, head, q0, s.queries, a.d);
      load_rows<D>(dout, a.dout, s.q_begin, head, q0, s.queries, a.d);
      if (threadIdx.x < mma_tile) {
        const bool real = q0 + static_cast<int>(threadIdx.x) < s.queries;
        const int64_t at = s.q_begin + q0 + threadIdx.x;
        lse[threadIdx.x] = real ? a.lse[head * a.lse_step + at] : 0.0f;
        delta[threadIdx.x] = real ? a.delta[head * a.queries + at] : 0.0f;
      }
      if constexpr (Dropped) a.mask.template draw<mma_tile, mma_rows>(mask, s.q_begin + q0, head, k0);
      __syncthreads();
      for (int i = 0; i < mma_tile; i += 16) {
        float score[2][4] = {}, grad[2][4] = {};
        two_gemms<smem_stride>(score, grad, k + own_row * smem_stride, q + i * smem_stride,
                               v + own_row * smem_stride, dout + i * smem_stride, a.d, g, t);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const int at = i + n * 8 + 2 * t + c % 2;
            const bool seen = visible(a, s, q0 + at, row + c / 2 * 8);
            const float p = seen ? __expf(a.scale * score[n][c] - lse[at]) : 0.0f;
            score[n][c] = p;
            if constexpr (Dropped) {
              const bool stays = kept<mma_rows>(mask, at, own_row + g + c / 2 * 8);
              if (!stays) score[n][c] = 0;
              grad[n][c] = stays ? grad[n][c] * a.mask.scale : 0.0f;
            }
            grad[n][c] = seen ? a.scale * p * (grad[n][c] - delta[at]) : 0.0f;
          }
        unsigned fp[4], fs[4], fb[2];
        accumulators_as_a(fp, score[0], score[1]);
        accumulators_as_a(fs, grad[0], grad[1]);
#pragma unroll
        for (int n = 0; n < Columns / 8; ++n) {
          if (column + n * 8 >= a.d) break;
          load_b<smem_stride>(fb, dout + i * smem_stride + column + n * 8, g, t);
          nrl_mma_m16n8k16_bf16<1>(&dv[n], fp, &fb);
          load_b<smem_stride>(fb, q + i * smem_stride + column + n * 8, g, t);
          nrl_mma_m16n8k16_bf16<1>(&dk[n], fs, &fb);
        }
      }
    }
  }
  const float one[2] = {1, 1}, kept_scale = Dropped ? a.mask.scale : 1.0f,
              scale[2] = {kept_scale, kept_scale};
  store_rows<Columns / 8>(a.dk, s.k_begin, kv_head, row, s.keys, column, a.d, dk, one, t);
  store_rows<Columns / 8>(a.dv, s.k_begin, kv_head, row, s.keys, column, a.d, dv, scale, t);
}

/// Calls run(integral_constant) with the head dimension rounded up.
template <class Run>
void with_rounded_d(int d, const Run& run) {
  if (d <= 64) return run(std::integral_constant<int, 64>());
  if (d <= 128) return run(std::integral_constant<int, 128>());
  run(std::integral_constant<int, 256>());
}

bool on_tensor_cores(const Tensor& t) {
  return t.dtype == DType::bf16 && t.dim(2) % 16 == 0 && kernel::aligned16(t.data) && t.stride[0] % 8 == 0 &&
         t.stride[1] % 8 == 0;
}
template <class... Tensors>
bool on_tensor_cores(const Tensor& first, const Tensors&... rest) {
  return on_tensor_cores(first) && on_tensor_cores(rest...);
}

constexpr size_t mma_shared(int matrices, int d) {
  return static_cast<size_t>(matrices * mma_tile * (d + 8)) * sizeof(bf16);
}

void mma_forward(Exec& exec, const AttentionForward& a) {
  const FlashArguments<bf16> f = flash_arguments<bf16>(a);
  const dim3 grid(flash_blocks(a, mma_rows), static_cast<unsigned>(a.q.dim(1)), flash_sequences(a));
  with_rounded_d(f.d, [&](auto rounded) {
    constexpr int D = decltype(rounded)::value;
    with_dropout(f.mask, [&](auto dropped) {
      constexpr bool Dropped = decltype(dropped)::value;
      NRL_LAUNCH((mma_forward_kernel<D, Dropped>), grid, mma_threads,
                 mma_shared(3, D) + (Dropped ? mma_mask_bytes : 0), exec.stream, f);
    });
  });
}

void mma_backward(Exec& exec, const AttentionBackward& a) {
  const FlashArguments<bf16> f = flash_backward_arguments<bf16>(exec, a);
  const auto heads = static_cast<unsigned>(a.q.dim(1)), kv_heads = static_cast<unsigned>(a.k.dim(1));
  const unsigned blocks = flash_blocks(a, mma_rows), sequences = flash_sequences(a);
  with_rounded_d(f.d, [&](auto rounded) {
    constexpr int D = decltype(rounded)::value, columns = D < 128 ? D : 128;
    with_dropout(f.mask, [&](auto dropped) {
      constexpr bool Dropped = decltype(dropped)::value;
      NRL_LAUNCH((mma_dq_kernel<D, Dropped>), dim3(blocks, heads, sequences), mma_threads,
                 mma_shared(4, D) + (Dropped ? mma_mask_bytes : 0), exec.stream, f);
      NRL_LAUNCH((mma_dkv_kernel<D, columns, Dropped>), dim3(blocks * (D / columns), kv_heads, sequences),
                 mma_threads,
                 mma_shared(4, D) + 2 * mma_tile * sizeof(float) + (Dropped ? mma_mask_bytes : 0),
                 exec.stream, f);
    });
  });
}

}  // namespace
}  // namespace nrl::ops::NRL_GPU
