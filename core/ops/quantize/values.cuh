#pragma once
// The numbers of a tile of 128 rows that a block rounds to FP8, in registers, and the largest of them. A warp
// has 16 rows of 64 columns, a lane 4 rows of 8 neighbors: loads of 16 bytes, of which 8 lanes make a line,
// and words of 4 codes in either direction.

#include "core/device/kernel.h"
#include "core/ops/shared/fp8.h"

namespace nrl::ops::NRL_GPU {
namespace {

using namespace kernel;

/// Block size of the kernels without a tile in registers.
constexpr int threads = 256, warps = threads / warp;

constexpr int side = 128, rows_per_lane = 4, columns_per_lane = 8, pairs = columns_per_lane / 2;
constexpr int warp_rows = 4 * rows_per_lane, warp_columns = 64, warps_down = side / warp_rows;

/// A thread's first row and column in the tile.
struct LanePlace {
  int lane = static_cast<int>(threadIdx.x % warp), w = static_cast<int>(threadIdx.x / warp);
  int row =
      static_cast<int>(threadIdx.x / warp % warps_down * warp_rows + threadIdx.x % warp / 8 * rows_per_lane);
  int column =
      static_cast<int>(threadIdx.x / (warp * warps_down) * warp_columns + threadIdx.x % 8 * columns_per_lane);
};

__device__ __forceinline__ unsigned magnitude(float x) {
  return __float_as_uint(x) & fp8::magnitude_bits;
}

/// The larger magnitude; NaN if either is.
__device__ __forceinline__ float larger(float a, float b) {
#if defined(__CUDACC__)
  float out;
  asm("{.reg .f32 x, y; abs.f32 x, %1; abs.f32 y, %2; max.NaN.f32 %0, x, y;}" : "=f"(out) : "f"(a), "f"(b));
  return out;
#else
  return __uint_as_float(max(magnitude(a), magnitude(b)));
#endif
}

__device__ __forceinline__ unsigned lanes_max(unsigned v, int lanes) {
  for (int o = lanes / 2; o; o >>= 1) v = max(v, __shfl_xor_sync(all_lanes, v, o));
  return v;
}

/// Upper halves of two words, and lower ones.
__device__ __forceinline__ unsigned upper_halves(unsigned low, unsigned high) {
  return __byte_perm(low, high, 0x7632);
}
__device__ __forceinline__ unsigned lower_halves(unsigned low, unsigned high) {
  return __byte_perm(low, high, 0x5410);
}

__device__ __forceinline__ unsigned word_of(const uint4& four, int i) {
  return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

/// The amax of each of a lane's rows and columns in 16 bits, two in a word. f32 is rounded up, which does not
/// change fp8::scale_of(): the numbers at which it changes have no more bits.
struct LineMaxima {
  unsigned rows[rows_per_lane / 2], columns[pairs];
};

/// Values of bf16, two in a word.
struct Bf16Values {
  unsigned words[rows_per_lane][pairs] = {};

  __device__ __forceinline__ void set(int r, const Pack<bf16>& pack) {
    static_assert(Pack<bf16>::words == 1);
#pragma unroll
    for (int p = 0; p < pairs; ++p) words[r][p] = word_of(pack.raw[0], p);
  }
  __device__ __forceinline__ float2 pair(int r, int p) const {
    return make_float2(__uint_as_float(words[r][p] << 16), __uint_as_float(words[r][p] & 0xffff0000u));
  }
  /// Bits of the largest magnitude.
  __device__ __forceinline__ unsigned largest() const {
    unsigned both = 0;
#pragma unroll
    for (int r = 0; r < rows_per_lane; ++r)
#pragma unroll
      for (int p = 0; p < pairs; ++p) both = __vmaxu2(both, words[r][p] & magnitudes);
    return max(both << 16, both & 0xffff0000u);
  }
  __device__ __forceinline__ LineMaxima line_maxima() const {
    unsigned rows[rows_per_lane] = {};
    LineMaxima out = {};
#pragma unroll
    for (int p = 0; p < pairs; ++p)
#pragma unroll
      for (int r = 0; r < rows_per_lane; ++r) {
        const unsigned both = words[r][p] & magnitudes;
        rows[r] = __vmaxu2(rows[r], both);
        out.columns[p] = __vmaxu2(out.columns[p], both);
      }
#pragma unroll
    for (int i = 0; i < rows_per_lane / 2; ++i)
      out.rows[i] =
          __vmaxu2(lower_halves(rows[2 * i], rows[2 * i + 1]), upper_halves(rows[2 * i], rows[2 * i + 1]));
    return out;
  }

 private:
  static constexpr unsigned magnitudes = 0x7fff7fffu;
};

/// Values of f32.
struct FloatValues {
  float v[rows_per_lane][columns_per_lane];

  __device__ __forceinline__ float2 pair(int r, int p) const {
    return make_float2(v[r][2 * p], v[r][2 * p + 1]);
  }
  __device__ __forceinline__ unsigned largest() const {
    float most = 0.0f;
#pragma unroll
    for (int r = 0; r < rows_per_lane; ++r)
#pragma unroll
      for (int c = 0; c < columns_per_lane; ++c) most = larger(most, v[r][c]);
    return magnitude(most);
  }
  __device__ __forceinline__ LineMaxima line_maxima() const {
    float rows[rows_per_lane] = {}, columns[columns_per_lane] = {};
#pragma unroll
    for (int r = 0; r < rows_per_lane; ++r)
#pragma unroll
      for (int c = 0; c < columns_per_lane; ++c)
        rows[r] = larger(rows[r], v[r][c]), columns[c] = larger(columns[c], v[r][c]);
    LineMaxima out;
#pragma unroll
    for (int i = 0; i < rows_per_lane / 2; ++i) out.rows[i] = rounded_up(rows[2 * i], rows[2 * i + 1]);
#pragma unroll
    for (int p = 0; p < pairs; ++p) out.columns[p] = rounded_up(columns[2 * p], columns[2 * p + 1]);
    return out;
  }

 private:
  static __device__ __forceinline__ unsigned rounded_up(float low, float high) {
    return upper_halves(rounded_up(magnitude(low)), rounded_up(magnitude(high)));
  }
  /// The lower half has no meaning. Finite numbers stay finite.
  static __device__ __forceinline__ unsigned rounded_up(unsigned bits) {
    return min(bits + 0xffffu, max(bits, 0x7f7f0000u));
  }
};

}  // namespace
}  // namespace nrl::ops::NRL_GPU
