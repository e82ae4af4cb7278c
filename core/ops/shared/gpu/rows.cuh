#pragma once
// Code shared by the GPU kernels of several ops: vectorized access to rows and weights, and reductions over
// the threads that share a row.

#include "core/device/kernel.h"
#include "core/ops/exec.h"
#include "core/ops/shared/rows.h"
#include "core/tensor/tensor.h"

namespace nrl::ops::NRL_GPU {

using kernel::load_floats;
using kernel::Pack;
using kernel::pack_bf16;
using kernel::pack_low;
using kernel::per_pack;
using kernel::store_floats;

/// True if every row of `t` allows 16-byte vector access, or `t` is absent.
inline bool packed_rows(const Tensor& t) {
  if (!t.data) return true;
  const int64_t pack = 16 / size_of(t.dtype);
  if (!kernel::aligned16(t.data) || t.dim(-1) % pack != 0) return false;
  for (int i = 0; i + 1 < t.rank; ++i)
    if (t.dim(i) > 1 && t.step(i) % pack != 0) return false;
  return true;
}

/// A vector of weights for activations of type T, read as float. f16 weights come with f16 activations only.
/// f32 or bf16 is a runtime branch, the same for all threads, so that kernels are not compiled for both.
template <class T>
struct FloatVector {
  const void* data = nullptr;
  bool is_bf16 = false;
  float offset = 0;

  FloatVector() = default;
  explicit FloatVector(const Tensor& t, float added = 0)
      : data(t.data), is_bf16(t.dtype == DType::bf16), offset(added) {}

  /// Elements i .. i + E - 1 plus the offset; with E > 1 the vector begins at a multiple of 16 bytes and E
  /// divides i.
  template <int E>
  __device__ __forceinline__ void get(int64_t i, float (&v)[E]) const {
    if constexpr (std::is_same_v<T, f16>) {
      load_floats(static_cast<const f16*>(data) + i, v);
    } else if (is_bf16) {
      load_floats(static_cast<const bf16*>(data) + i, v);
    } else {
      load_floats(static_cast<const float*>(data) + i, v);
    }
#pragma unroll
    for (int e = 0; e < E; ++e) v[e] += offset;
  }
};

/// The threads of a block that share a row: `lanes` neighbors, a power of two up to 32, or whole warps. The
/// block's size must be a multiple of `lanes` and of 32.
class RowGroup {
 public:
  __device__ __forceinline__ explicit RowGroup(int lanes)
      : lanes_(lanes), index_(static_cast<int>(threadIdx.x) / lanes) {}
  __device__ __forceinline__ int index() const { return index_; }
  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) - index_ * lanes_; }

  /// Sums over the group, the same in each of its threads. All threads of the block must call it.
  __device__ __forceinline__ float2 sum(float2 v) {
    v = lanes_sum(v, lanes_);
    if (lanes_ <= kernel::warp) return v;
    // Double-buffered, so that one __syncthreads() per reduction suffices.
    NRL_SHARED(float2, parts, [2][32]);
    return lanes_sum(part_of_lane(parts[flip()], v, make_float2(0, 0)), kernel::warp);
  }
  __device__ __forceinline__ float sum(float v) {
    v = lanes_sum(v, lanes_);
    if (lanes_ <= kernel::warp) return v;
    NRL_SHARED(float, single_parts, [2][32]);
    return lanes_sum(part_of_lane(single_parts[flip()], v, 0.0f), kernel::warp);
  }

 private:
  // Unrolled, because a loop of unknown length takes more instructions than its shuffles.
  static __device__ __forceinline__ float2 lanes_sum(float2 v, int lanes) {
#pragma unroll
    for (int o = kernel::warp / 2; o; o >>= 1) {
      if (o >= lanes) continue;
      v.x += __shfl_xor_sync(kernel::all_lanes, v.x, o);
      v.y += __shfl_xor_sync(kernel::all_lanes, v.y, o);
    }
    return v;
  }
  static __device__ __forceinline__ float lanes_sum(float v, int lanes) {
#pragma unroll
    for (int o = kernel::warp / 2; o; o >>= 1)
      if (o < lanes) v += __shfl_xor_sync(kernel::all_lanes, v, o);
    return v;
  }
  /// Stores the sum of each warp in `parts`; returns the sum of the group's warp number `lane`, or zero.
  template <class V>
  __device__ __forceinline__ V part_of_lane(V* parts, V sum, V zero) const {
    const int lane = threadIdx.x % kernel::warp, warps = lanes_ / kernel::warp;
    if (lane == 0) parts[threadIdx.x / kernel::warp] = sum;
    __syncthreads();
    return lane < warps ? parts[index_ * warps + lane] : zero;
  }
  __device__ __forceinline__ int flip() {
    buffer_ ^= 1;
    return buffer_;
  }
  int lanes_, index_, buffer_ = 0;
};

/// Calls body.operator()<T>() with an element type of f32 or bf16.
template <class Body>
void for_f32_or_bf16(DType dtype, const Body& body) {
  if (dtype == DType::bf16) {
    body.template operator()<bf16>();
  } else {
    body.template operator()<float>();
  }
}
/// The same for the element type of an activation tensor: f32, bf16 or f16.
template <class Body>
void for_float_type(DType dtype, const Body& body) {
  if (dtype == DType::f16) {
    body.template operator()<f16>();
  } else {
    for_f32_or_bf16(dtype, body);
  }
}
/// Calls body.operator()<T, W>() for two tensors: f16 comes with f16 only (are_float_pair()).
template <class Body>
void for_float_pair(DType first, DType second, const Body& body) {
  if (first == DType::f16) {
    body.template operator()<f16, f16>();
  } else {
    for_f32_or_bf16(first, [&]<class T>() {
      for_f32_or_bf16(second, [&]<class W>() { body.template operator()<T, W>(); });
    });
  }
}

constexpr int round_up(int64_t n, int64_t unit) {
  return static_cast<int>((n + unit - 1) / unit * unit);
}
/// Smallest power of two >= n.
constexpr int power_of_two(int64_t n) {
  int p = 1;
  while (p < n) p *= 2;
  return p;
}

}  // namespace nrl::ops::NRL_GPU
