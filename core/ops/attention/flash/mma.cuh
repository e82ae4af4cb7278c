#pragma once
// Code shared by the bf16 kernels on tensor cores: tiles in shared memory, fragments of mma.m16n8k16, and the
// keys that a warp's rows see. Included by mma_forward.cuh and mma_backward.cuh alone.
//
// A tile has rows of D elements, whose 16-byte units are permuted within groups (XOR with the row), so that
// the eight rows of an 8 x 8 matrix, read by ldmatrix, and the stores of cp.async hit all 32 banks. Fragments
// as in the PTX manual: lane 4 g + t holds rows g and g + 8 and column pairs 2 t and 2 t + 8.

#include "core/ops/attention/flash/simt.cuh"
#include "core/ops/shared/gpu/rows.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

constexpr float log2_e = 1.44269504088896340736f;

/// XOR mask for the unit indices of a row: rows of 64 elements fill the 32 banks, rows of 32 half of them.
template <int D>
__device__ __forceinline__ constexpr int swizzle(int row) {
  static_assert(D % 32 == 0);
  return D % 64 == 0 ? row & 7 : row >> 1 & 3;
}

// Opaque: sums take most registers, addresses and row numbers are cheap to compute again.
__device__ __forceinline__ int thread_id() {
  return nrl_opaque(static_cast<int>(threadIdx.x));
}
__device__ __forceinline__ int lane_id() {
  return thread_id() % kernel::warp;
}
__device__ __forceinline__ int warp_id() {
  return thread_id() / kernel::warp;
}

/// Starts copying rows [begin, begin + Rows) of a head to a tile, zero past the end of the sequence and from
/// column d on. Each thread copies one unit of every `pass`th row: a loop, because the addresses of all
/// copies at once would take registers that hold sums.
template <int D, int Rows, int Threads>
__device__ __forceinline__ void copy_tile(bf16* to, const HeadRows<bf16>& from, int64_t first, int head,
                                          int begin, int end, int d) {
  constexpr int units = D / 8, most = Threads / units, pass = most >= 8 ? most / 8 * 8 : 4;
  static_assert(Rows % pass == 0 && most >= pass);
  const int thread = thread_id(), r = thread / units, u = thread % units;
  if (pass * units < Threads && r >= pass) return;
  const int rows = u * 8 < d ? end - begin - r : 0;
  const bf16* p = from(first + begin + r, head) + u * 8;
  const int64_t step = pass * from.row_step;
  // The swizzle has a period of 8 rows.
  constexpr int alike = pass % 8 == 0 ? 1 : 8 / pass;
#pragma unroll 1
  for (int i = 0; i < Rows; i += pass * alike)
#pragma unroll
    for (int j = 0; j < alike; ++j, p += step) {
      // Zeros are copied from nowhere, but not from an address outside of the tensor either.
      const bool real = i + j * pass < rows;
      nrl_cp_async16(to + (i + j * pass + r) * D + (u ^ swizzle<D>(r + j * pass)) * 8, real ? p : from.data,
                     real);
    }
}

/// Addresses of a lane's rows of 8 x 8 matrices: 16 rows and 16 columns (a pair of units) per ldmatrix.
/// `row` (of 16) and `pair` are added to the arguments of load(), with disjoint bits in pair % 4.
enum class Operand : uint8_t { a, b };
template <int D, Operand Which, bool Transposed>
class Fragments {
 public:
  __device__ __forceinline__ Fragments(const bf16* tile, int row, int pair) : tile_(tile) {
    // Matrix 1 holds the second rows of A and matrix 2 its second columns; B has them the other way around.
    constexpr bool rows_first = (Which == Operand::a) != Transposed;
    const int lane = lane_id(), r = rows_first ? lane % 16 : lane % 8 + lane / 16 * 8,
              unit = rows_first ? lane / 16 : lane / 8 % 2;
    rows_ = (row * 16 + r) * row_bytes + pair / 4 * 128;
    swizzle_ = (unit ^ swizzle<D>(r)) * 16 ^ pair % 4 * 32;
  }
  /// The 16 x 16 at 16 * row, 16 * pair of the tile as it lies in memory; both known to the compiler.
  __device__ __forceinline__ void load(unsigned* f, int row, int pair) const {
    nrl_ldmatrix_x4<Transposed>(
        f, tile_, (rows_ + (pair % 4 * 32 ^ swizzle_)) + (row * 16 * row_bytes + pair / 4 * 128));
  }

 private:
  static constexpr int row_bytes = D * static_cast<int>(sizeof(bf16));
  const bf16* tile_;
  int rows_, swizzle_;  // bytes
};

/// sum[m][n] += A B over K / 16 steps, A: 16 RowTiles rows, B: 16 Pairs columns. Between the tiles of a warp
/// are RowStep - 1 and PairStep - 1 tiles of other warps. A lies in shared memory transposed (the sum runs
/// over its rows) if TransposedA, B as written if TransposedB and else transposed.
template <int K, int RowTiles, int RowStep, int Pairs, int PairStep, int DA, bool TransposedA, int DB,
          bool TransposedB>
__device__ __forceinline__ void gemm(float (*sum)[2 * Pairs][4],
                                     const Fragments<DA, Operand::a, TransposedA>& a,
                                     const Fragments<DB, Operand::b, TransposedB>& b) {
#pragma unroll
  for (int k = 0; k < K / 16; ++k) {
    unsigned fa[RowTiles][4];
#pragma unroll
    for (int m = 0; m < RowTiles; ++m)
      a.load(fa[m], TransposedA ? k : m * RowStep, TransposedA ? m * RowStep : k);
#pragma unroll
    for (int n = 0; n < Pairs; ++n) {
      unsigned fb[2][2];
      b.load(fb[0], TransposedB ? k : n * PairStep, TransposedB ? n * PairStep : k);
#pragma unroll
      for (int m = 0; m < RowTiles; ++m) nrl_mma_m16n8k16<bf16, 2>(sum[m] + 2 * n, fa[m], fb);
    }
  }
}

/// The keys that rows [row, row + Rows) of a sequence see: no row sees any outside of [first, last], every
/// row sees [first_of_all, last_of_all].
struct VisibleKeys {
  int first, last, first_of_all, last_of_all;
  template <class T>
  __device__ __forceinline__ VisibleKeys(const FlashArguments<T>& a, const Sequence& s, int row, int rows) {
    first = first_of_all = 0;
    last = last_of_all = s.keys - 1;
    if (!a.causal) return;
    last = min(last, row + rows - 1 + s.shift);
    last_of_all = min(last_of_all, row + s.shift);
    if (a.window == 0) return;
    const int64_t behind_window = row + s.shift + 1 - a.window;
    first = static_cast<int>(max(behind_window, int64_t{0}));
    first_of_all = static_cast<int>(max(behind_window + rows - 1, int64_t{0}));
  }
  __device__ __forceinline__ bool any(int key, int keys) const { return key <= last && key + keys > first; }
  __device__ __forceinline__ bool all(int key, int keys) const {
    return key >= first_of_all && key + keys - 1 <= last_of_all;
  }
};

/// Reductions over the four lanes of a row.
__device__ __forceinline__ float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(kernel::all_lanes, v, 1));
  return fmaxf(v, __shfl_xor_sync(kernel::all_lanes, v, 2));
}
__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(kernel::all_lanes, v, 1);
  return v + __shfl_xor_sync(kernel::all_lanes, v, 2);
}

/// Writes a row of a warp's sums, half `half` of each tile, if it is real; pair n begins at column
/// 16 (n * PairStep + pair). All lanes must call it: neighbors exchange pairs, so that each stores 8 bytes.
template <int Pairs, int PairStep>
__device__ __forceinline__ void store_row(bf16* row, bool real, int d, const float (*sum)[4], int half,
                                          int pair, float factor) {
  const int t = lane_id() % 4;
  const bool odd = t % 2 == 1;
#pragma unroll
  for (int n = 0; n < Pairs; ++n) {
    const int column = (n * PairStep + pair) * 16;
    if (column >= d) break;
    const unsigned left = pack_bf16(sum[2 * n][2 * half] * factor, sum[2 * n][2 * half + 1] * factor),
                   right =
                       pack_bf16(sum[2 * n + 1][2 * half] * factor, sum[2 * n + 1][2 * half + 1] * factor),
                   other = __shfl_xor_sync(kernel::all_lanes, odd ? left : right, 1);
    Pack<bf16, 4> four;
    four.raw[0] = odd ? make_uint2(other, right) : make_uint2(left, other);
    if (real) four.store(row + column + (odd ? 8 : 0) + t / 2 * 4);
  }
}

/// True if the kernels on tensor cores support the tensors: bf16, heads of a multiple of 16, 16-byte rows.
bool on_tensor_cores(const Tensor& t) {
  return t.dtype == DType::bf16 && t.dim(2) % 16 == 0 && kernel::aligned16(t.data) && t.stride[0] % 8 == 0 &&
         t.stride[1] % 8 == 0;
}
template <class... Tensors>
bool on_tensor_cores(const Tensor& first, const Tensors&... rest) {
  return on_tensor_cores(first) && on_tensor_cores(rest...);
}

/// Calls run(integral_constant) with the head dimension rounded up to one that kernels are compiled for.
template <class Run>
void with_rounded_d(int d, const Run& run) {
  if (d <= 64) return run(std::integral_constant<int, 64>());
  if (d <= 96) return run(std::integral_constant<int, 96>());
  if (d <= 128) return run(std::integral_constant<int, 128>());
  if (d <= 192) return run(std::integral_constant<int, 192>());
  run(std::integral_constant<int, 256>());
}

}  // namespace
}  // namespace nrl::ops::NRL_GPU
