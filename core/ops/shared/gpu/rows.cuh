#pragma once
// What GPU kernels of several families share: rows of strided tensors, packs of elements that are read and
// written at once, sums over the threads that share a row.

#include "core/device/kernel.h"
#include "core/ops/exec.h"
#include "core/tensor/tensor.h"

namespace nrl::ops::NRL_GPU {

/// Division by a number known at launch, without the long instruction sequence of an integer division
/// (Granlund & Montgomery 1994, round-up method for 31-bit numerators).
class Divider {
 public:
  Divider() : Divider(1) {}
  /// `divisor` >= 1.
  explicit Divider(int64_t divisor) : divisor_(divisor) {
    while (shift_ < 31 && (int64_t{1} << shift_) < divisor) ++shift_;
    const int64_t power = int64_t{1} << shift_;
    // A divisor beyond 2^31 is above every 31-bit numerator: multiplier 0 gives the quotient 0.
    if (divisor <= power) multiplier_ = static_cast<unsigned>((((power - divisor) << 32) / divisor) + 1);
  }
  __device__ __forceinline__ int64_t quotient(int64_t n) const {
    if (n >> 31) return n / divisor_;
    const auto low = static_cast<unsigned>(n);
    return (static_cast<unsigned>((uint64_t{low} * multiplier_) >> 32) + low) >> shift_;
  }
  __device__ __forceinline__ int64_t divisor() const { return divisor_; }

 private:
  int64_t divisor_;
  unsigned multiplier_ = 0, shift_ = 0;
};

/// The rows of a tensor of rank 1 to 3 that may be absent; row r of (N, heads, D) is head r % heads of token
/// r / heads.
template <class T>
struct Rows {
  T* data = nullptr;
  int64_t outer_step = 0, inner_step = 0;
  Divider inner;

  Rows() = default;
  explicit Rows(const Tensor& t) : data(static_cast<T*>(t.data)) {
    if (t.rank >= 2) outer_step = t.stride[0];
    if (t.rank == 3) {
      inner = Divider(t.shape[1]);
      inner_step = t.stride[1];
    }
  }
  __device__ __forceinline__ T* operator[](int64_t row) const {
    if (inner.divisor() == 1) return data + row * outer_step;
    const int64_t outer = inner.quotient(row);
    return data + outer * outer_step + (row - outer * inner.divisor()) * inner_step;
  }
};

/// Elements of T in 16 bytes.
template <class T>
inline constexpr int per_pack = 16 / sizeof(T);

/// True when the rows of `t` can be accessed in 16 bytes each time; absent tensors can.
inline bool packed_rows(const Tensor& t) {
  if (!t.data) return true;
  const int64_t pack = 16 / size_of(t.dtype);
  if (!kernel::aligned16(t.data) || t.dim(-1) % pack != 0) return false;
  for (int i = 0; i + 1 < t.rank; ++i)
    if (t.dim(i) > 1 && t.step(i) % pack != 0) return false;
  return true;
}

/// Two floats rounded to bf16, `low` in the lower half.
__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
#if defined(__CUDACC__)
  unsigned both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
#else
  return bf16(low).bits | (static_cast<unsigned>(bf16(high).bits) << 16);
#endif
}

/// E elements of T as they lie in memory: one, or 16 bytes. Zero at first.
template <class T, int E>
struct Pack;

template <class T>
struct Pack<T, 1> {
  T raw = T();
  __device__ __forceinline__ void load(const T* p) { raw = *p; }
  __device__ __forceinline__ void store(T* p) const { *p = raw; }
  __device__ __forceinline__ void get(float (&v)[1]) const { v[0] = static_cast<float>(raw); }
  __device__ __forceinline__ void set(const float (&v)[1]) { raw = T(v[0]); }
};

template <>
struct Pack<float, 4> {
  float4 raw = {};
  __device__ __forceinline__ void load(const float* p NRL_SITE_PARAMETER) {
    NRL_CHECK_ALIGNED(p, 16);
    raw = *reinterpret_cast<const float4*>(p);
  }
  __device__ __forceinline__ void store(float* p NRL_SITE_PARAMETER) const {
    NRL_CHECK_ALIGNED(p, 16);
    *reinterpret_cast<float4*>(p) = raw;
  }
  __device__ __forceinline__ void get(float (&v)[4]) const {
    v[0] = raw.x, v[1] = raw.y, v[2] = raw.z, v[3] = raw.w;
  }
  __device__ __forceinline__ void set(const float (&v)[4]) { raw = make_float4(v[0], v[1], v[2], v[3]); }
};

template <>
struct Pack<bf16, 8> {
  uint4 raw = {};
  __device__ __forceinline__ void load(const bf16* p NRL_SITE_PARAMETER) {
    NRL_CHECK_ALIGNED(p, 16);
    raw = *reinterpret_cast<const uint4*>(p);
  }
  __device__ __forceinline__ void store(bf16* p NRL_SITE_PARAMETER) const {
    NRL_CHECK_ALIGNED(p, 16);
    *reinterpret_cast<uint4*>(p) = raw;
  }
  __device__ __forceinline__ void get(float (&v)[8]) const {
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = __uint_as_float(words[i] << 16);
      v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
  __device__ __forceinline__ void set(const float (&v)[8]) {
    raw = make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]),
                     pack_bf16(v[6], v[7]));
  }
};

/// A vector of f32 or bf16 (weights), read as float. Its type is looked at when it is read: the branch is the
/// same for all threads, and kernels need not be compiled for both.
struct FloatVector {
  const void* data = nullptr;
  bool low = false;  ///< bf16

  FloatVector() = default;
  explicit FloatVector(const Tensor& t) : data(t.data), low(t.dtype == DType::bf16) {}

  /// Elements i .. i + E - 1; with E > 1 the vector begins at a multiple of 16 bytes and E divides i.
  template <int E>
  __device__ __forceinline__ void get(int64_t i, float (&v)[E]) const {
    if constexpr (E == 1) {
      v[0] = low ? static_cast<float>(static_cast<const bf16*>(data)[i]) : static_cast<const float*>(data)[i];
    } else if (low) {
      const auto* p = reinterpret_cast<const uint2*>(static_cast<const bf16*>(data) + i);
#pragma unroll
      for (int k = 0; k < E / 4; ++k) {
        const uint2 raw = p[k];
        v[4 * k] = __uint_as_float(raw.x << 16);
        v[4 * k + 1] = __uint_as_float(raw.x & 0xffff0000u);
        v[4 * k + 2] = __uint_as_float(raw.y << 16);
        v[4 * k + 3] = __uint_as_float(raw.y & 0xffff0000u);
      }
    } else {
      const auto* p = reinterpret_cast<const float4*>(static_cast<const float*>(data) + i);
#pragma unroll
      for (int k = 0; k < E / 4; ++k) {
        const float4 raw = p[k];
        v[4 * k] = raw.x, v[4 * k + 1] = raw.y, v[4 * k + 2] = raw.z, v[4 * k + 3] = raw.w;
      }
    }
  }
};

/// Writes E floats to consecutive places; with E > 1 `p` is a multiple of 16 bytes.
template <int E>
__device__ __forceinline__ void put_floats(float* p, const float (&v)[E]) {
  if constexpr (E == 1) {
    *p = v[0];
  } else {
#pragma unroll
    for (int k = 0; k < E / 4; ++k)
      reinterpret_cast<float4*>(p)[k] = make_float4(v[4 * k], v[4 * k + 1], v[4 * k + 2], v[4 * k + 3]);
  }
}

/// The threads of a block that share a row: `lanes` neighbours, a power of two up to 32, or whole warps. The
/// block's size is a multiple of `lanes` and of 32.
class RowGroup {
 public:
  __device__ __forceinline__ explicit RowGroup(int lanes)
      : lanes_(lanes), index_(static_cast<int>(threadIdx.x) / lanes) {}
  __device__ __forceinline__ int index() const { return index_; }
  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) - index_ * lanes_; }

  /// Sums over the group, the same in each of its threads. All threads of the block must call it.
  __device__ __forceinline__ float2 sum(float2 v) {
    v = lanes_sum(v, lanes_ < kernel::warp ? lanes_ : kernel::warp);
    if (lanes_ <= kernel::warp) return v;
    // Two arrays in turn: nobody writes one of them again before all have passed the other's barrier.
    NRL_SHARED(float2, parts, [2][32]);
    const int lane = threadIdx.x % kernel::warp, warps = lanes_ / kernel::warp;
    float2* part = parts[turn_];
    turn_ ^= 1;
    if (lane == 0) part[threadIdx.x / kernel::warp] = v;
    __syncthreads();
    return lanes_sum(lane < warps ? part[index_ * warps + lane] : make_float2(0, 0), kernel::warp);
  }
  __device__ __forceinline__ float sum(float v) {
    if (lanes_ > kernel::warp) return sum(make_float2(v, 0)).x;
    for (int o = lanes_ / 2; o; o >>= 1) v += __shfl_xor_sync(kernel::all_lanes, v, o);
    return v;
  }

 private:
  static __device__ __forceinline__ float2 lanes_sum(float2 v, int lanes) {
    for (int o = lanes / 2; o; o >>= 1) {
      v.x += __shfl_xor_sync(kernel::all_lanes, v.x, o);
      v.y += __shfl_xor_sync(kernel::all_lanes, v.y, o);
    }
    return v;
  }
  int lanes_, index_, turn_ = 0;
};

/// Calls body.operator()<T>() with the element type of an activation tensor.
template <class Body>
void for_float_type(DType dtype, const Body& body) {
  if (dtype == DType::bf16) {
    body.template operator()<bf16>();
  } else {
    body.template operator()<float>();
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
