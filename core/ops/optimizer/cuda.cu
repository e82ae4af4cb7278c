// The optimizer and the reductions around it on the GPU; formulas in core/ops/optimizer.h.
//
// update_kernel: four blocks per chunk; writes (=) param, exp_avg, exp_avg_sq and param_bf16.
// update_reduced_kernel: the same with state in formats of fewer bits and remainders, or without master
// weights. squares_kernel, sum_kernel: sums in double; a partial sum per norm_block elements (=, workspace),
// which one block adds up. convert_kernel: out = x. parts_kernel: out = or += the sum of parts. zero_kernel:
// clears memory. decide_kernel: one thread.

#include "core/device/kernel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/optimizer/adamw_step.h"
#include "core/ops/optimizer/decide_step.h"
#include "core/ops/shared/gpu/rows.cuh"
#include "core/ops/shared/gpu/sums.cuh"
#include "core/ops/shared/moments.h"
#include "core/ops/shared/scratch.h"
#include "core/ops/transfer.h"

namespace nrl::ops::NRL_GPU {
namespace {

using namespace kernel;

constexpr int threads = 256;

// --- AdamW -----------------------------------------------------------------------------------------------

/// Each chunk is split across this many blocks to reduce the tail effect.
constexpr int64_t blocks_per_chunk = 4;
constexpr int64_t elements_per_block = adamw_chunk / blocks_per_chunk;

/// Four neighbors, accessed at once.
template <class T>
struct alignas(4 * sizeof(T)) Four {
  T v[4];
  __device__ __forceinline__ static Four load(const void* from) { return *static_cast<const Four*>(from); }
  __device__ __forceinline__ void store(void* to) const { *static_cast<Four*>(to) = *this; }
};

/// exp_avg or exp_avg_sq in any of the formats.
struct Moment {
  void* values;
  unsigned char* scales;
  DType dtype;
};

struct UpdateArguments {
  float *param, *exp_avg, *exp_avg_sq;
  const float* grad;
  const unsigned short* grad_bf16;  ///< in update_reduced_kernel, instead of grad; null: grad
  unsigned short* param_bf16;       ///< the bits, of f16 if `f16_copy`
  bool f16_copy;
  unsigned short* remainder;
  Moment mean, square;    ///< in update_reduced_kernel, instead of exp_avg and exp_avg_sq
  const int64_t* chunks;  ///< null: the whole buffers, in chunks of adamw_chunk elements
  int64_t n;
  const double* scalars;  ///< null: `host`
  AdamWScalars host;
  AdamWConstants constants;
  AdamWRates rates[adamw_rates];
};

/// The elements of a block: the first one in the flat and in the state buffers, and how many; 0: none.
struct BlockRange {
  int64_t flat, state;
  int n;
};

/// Finds the elements of this block and the constants of their update. All threads must call it.
__device__ __forceinline__ BlockRange begin_update(const UpdateArguments& a, element::AdamWStep& step) {
  NRL_SHARED(element::AdamWStep, constants);
  NRL_SHARED(int, skipped);
  const int64_t chunk = blockIdx.x / blocks_per_chunk,
                begin = blockIdx.x % blocks_per_chunk * elements_per_block;
  int64_t flat = chunk * adamw_chunk, state = flat, count = min(adamw_chunk, a.n - flat);
  int64_t rates = 0;
  if (a.chunks) {
    const int64_t* row = a.chunks + 4 * chunk;
    flat = row[0];
    state = row[1];
    count = row[2];
    rates = row[3];
  }
  const int n = static_cast<int>(min(elements_per_block, count - begin));
  if (n <= 0) return {0, 0, 0};
  if (threadIdx.x == 0) {
    const AdamWScalars s = a.scalars ? adamw_scalars(a.scalars) : a.host;
    constants = adamw_step(s, a.constants, a.rates[rates]);
    skipped = s.skip;
  }
  __syncthreads();
  step = constants;
  return {flat + begin, state + begin, skipped != 0 ? 0 : n};
}

/// The bits of a weight in the type that the layers read, f16 or bf16.
__device__ __forceinline__ unsigned short copy_of(float x, bool f16_copy) {
  return f16_copy ? f16::round(x) : moments::split(x).high;
}

template <bool with_copy, bool f16_copy>
__global__ void __launch_bounds__(threads) update_kernel(UpdateArguments a) {
  element::AdamWStep s;
  const BlockRange range = begin_update(a, s);
  const int n = range.n;
  if (n == 0) return;

  float* __restrict__ p = a.param + (with_copy ? range.state : range.flat);
  const float* __restrict__ g = a.grad + range.flat;
  float* __restrict__ m = a.exp_avg + range.state;
  float* __restrict__ v = a.exp_avg_sq + range.state;
  unsigned short* __restrict__ copy = with_copy ? a.param_bf16 + range.flat : nullptr;

  auto address = [](const void* x) { return reinterpret_cast<uintptr_t>(x); };
  const bool vectors = ((address(p) | address(g) | address(m) | address(v)) % 16 | address(copy) % 8) == 0;
  const int whole = vectors ? n / 4 * 4 : 0;
  for (int i = static_cast<int>(threadIdx.x) * 4; i < whole; i += threads * 4) {
    float p4[4], m4[4], v4[4], g4[4];
    load_floats(p + i, p4);
    load_floats(m + i, m4);
    load_floats(v + i, v4);
    load_floats(g + i, g4);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const element::AdamWState x = element::adamw<GpuMath>(s, {p4[k], m4[k], v4[k]}, g4[k]);
      p4[k] = x.param;
      m4[k] = x.exp_avg;
      v4[k] = x.exp_avg_sq;
    }
    store_floats(p + i, p4);
    store_floats(m + i, m4);
    store_floats(v + i, v4);
    if constexpr (with_copy) {
      Four<uint16_t> bits;
#pragma unroll
      for (int k = 0; k < 4; ++k) bits.v[k] = copy_of(p4[k], f16_copy);
      bits.store(copy + i);
    }
  }
  for (int i = whole + static_cast<int>(threadIdx.x); i < n; i += threads) {
    const element::AdamWState x = element::adamw<GpuMath>(s, {p[i], m[i], v[i]}, g[i]);
    p[i] = x.param;
    m[i] = x.exp_avg;
    v[i] = x.exp_avg_sq;
    if constexpr (with_copy) copy[i] = copy_of(x.param, f16_copy);
  }
}

/// The elements i .. i + 3 of a block's range, of which `count` exist.
template <class T>
__device__ __forceinline__ void load_four(const T* from, int count, bool vectors, T (&out)[4]) {
  if (vectors && count >= 4) {
    const Four<T> four = Four<T>::load(from);
#pragma unroll
    for (int k = 0; k < 4; ++k) out[k] = four.v[k];
    return;
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) out[k] = k < count ? from[k] : T{};
}

template <class T>
__device__ __forceinline__ void store_four(T* to, int count, bool vectors, const T (&x)[4]) {
  if (vectors && count >= 4) {
    Four<T> four;
#pragma unroll
    for (int k = 0; k < 4; ++k) four.v[k] = x[k];
    four.store(to);
    return;
  }
#pragma unroll
  for (int k = 0; k < 4; ++k)
    if (k < count) to[k] = x[k];
}

template <DType format, class Code>
__device__ __forceinline__ void decode_four(const Moment& a, int64_t at, int count, bool vectors,
                                            float (&x)[4]) {
  Code codes[4];
  load_four(static_cast<const Code*>(a.values) + at, count, vectors, codes);
  const float scale = count > 0 ? fp8::scale_value(a.scales[at / moment_block]) : 0.0f;
#pragma unroll
  for (int k = 0; k < 4; ++k) x[k] = moments::decode<format>(codes[k]) * scale;
}

/// Neighboring lanes with the elements of one block of the scales.
constexpr int lanes_per_scale = static_cast<int>(moment_block) / 4;

template <DType format, class Code>
__device__ __forceinline__ void encode_four(const Moment& a, int64_t at, int count, bool vectors,
                                            const float (&x)[4], const uint32_t (&random)[4], bool nonzero) {
  unsigned largest = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k)
    if (k < count)
      largest = max(largest, static_cast<unsigned>(moments::bits_of(x[k]) & fp8::magnitude_bits));
#pragma unroll
  for (int o = lanes_per_scale / 2; o; o >>= 1)
    largest = max(largest, __shfl_xor_sync(all_lanes, largest, o));
  const unsigned byte = fp8::scale_of<format>(largest);
  const float inverse = fp8::inverse_scale(byte);
  __syncwarp();  // the other lanes of the block of the scale have read the old one
  if (count > 0 && at % moment_block == 0) a.scales[at / moment_block] = static_cast<unsigned char>(byte);
  Code codes[4];
#pragma unroll
  for (int k = 0; k < 4; ++k)
    codes[k] = static_cast<Code>(moments::encode<format>(x[k] * inverse, random[k], nonzero));
  store_four(static_cast<Code*>(a.values) + at, count, vectors, codes);
}

__device__ __forceinline__ void load_moment(const Moment& a, int64_t at, int count, bool vectors,
                                            float (&x)[4]) {
  if (a.dtype == DType::f32) {
    load_four(static_cast<const float*>(a.values) + at, count, vectors, x);
  } else if (a.dtype == DType::bf16) {
    unsigned short bits[4];
    load_four(static_cast<const unsigned short*>(a.values) + at, count, vectors, bits);
#pragma unroll
    for (int k = 0; k < 4; ++k) x[k] = moments::float_of(static_cast<uint32_t>(bits[k]) << 16);
  } else if (a.dtype == DType::f16) {
    decode_four<DType::f16, unsigned short>(a, at, count, vectors, x);
  } else {
    decode_four<DType::e4m3, unsigned char>(a, at, count, vectors, x);
  }
}

__device__ __forceinline__ void store_moment(const Moment& a, int64_t at, int count, bool vectors,
                                             const float (&x)[4], const uint32_t (&random)[4], bool nonzero) {
  if (a.dtype == DType::f32) {
    store_four(static_cast<float*>(a.values) + at, count, vectors, x);
  } else if (a.dtype == DType::bf16) {
    unsigned short bits[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) bits[k] = static_cast<unsigned short>(moments::encode_bf16(x[k], random[k]));
    store_four(static_cast<unsigned short*>(a.values) + at, count, vectors, bits);
  } else if (a.dtype == DType::f16) {
    encode_four<DType::f16, unsigned short>(a, at, count, vectors, x, random, nonzero);
  } else {
    encode_four<DType::e4m3, unsigned char>(a, at, count, vectors, x, random, nonzero);
  }
}

/// The formats are runtime branches, the same for all threads. Four elements per thread, so that 16 lanes
/// share a scale; all threads stay in the loop for their reductions.
__global__ void __launch_bounds__(threads) update_reduced_kernel(UpdateArguments a) {
  element::AdamWStep s;
  const BlockRange range = begin_update(a, s);
  auto unaligned = [](const void* x, int64_t size) {
    return reinterpret_cast<uintptr_t>(x) % static_cast<uintptr_t>(4 * size) != 0;
  };
  const bool vectors = range.flat % 4 == 0 && range.state % 4 == 0 && !unaligned(a.grad, 4) &&
                       !unaligned(a.grad_bf16, 2) && !unaligned(a.param, 4) && !unaligned(a.param_bf16, 2) &&
                       !unaligned(a.remainder, 2) && !unaligned(a.mean.values, 4) &&
                       !unaligned(a.square.values, 4);
  unsigned short* const high = a.param_bf16;
  for (int base = 0; base < range.n; base += threads * 4) {
    const int i = base + static_cast<int>(threadIdx.x) * 4, count = max(0, min(4, range.n - i));
    const int64_t flat = range.flat + i, state = range.state + i, at = a.param_bf16 ? state : flat;
    float p[4], m[4], v[4], g[4];
    unsigned short bits[4], low[4];
    uint32_t random_mean[4], random_square[4];
    if (a.grad_bf16) {
      load_four(a.grad_bf16 + flat, count, vectors, bits);
#pragma unroll
      for (int k = 0; k < 4; ++k) g[k] = moments::float_of(static_cast<uint32_t>(bits[k]) << 16);
    } else {
      load_four(a.grad + flat, count, vectors, g);
    }
    load_moment(a.mean, state, count, vectors, m);
    load_moment(a.square, state, count, vectors, v);
    if (a.param) {
      load_four(a.param + at, count, vectors, p);
    } else {
      load_four(high + flat, count, vectors, bits);
      if (a.remainder) load_four(a.remainder + state, count, vectors, low);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (a.remainder)
        p[k] = moments::join({bits[k], low[k]});
      else if (!a.param)
        p[k] = moments::float_of(static_cast<uint32_t>(bits[k]) << 16);
      const element::AdamWState x = element::adamw<GpuMath>(s, {p[k], m[k], v[k]}, g[k]);
      p[k] = x.param;
      m[k] = x.exp_avg;
      v[k] = x.exp_avg_sq;
      random_mean[k] = moments::random_bits(s.seed, g[k], m[k]);
      random_square[k] = moments::random_bits(~s.seed, g[k], v[k]);
      bits[k] = a.param || a.remainder
                    ? copy_of(p[k], a.f16_copy)
                    : static_cast<unsigned short>(moments::encode_bf16(
                          p[k], moments::random_bits(moments::seed_of_weights(s.seed), g[k], p[k])));
      low[k] = moments::split(p[k]).low;
    }
    store_moment(a.mean, state, count, vectors, m, random_mean, false);
    store_moment(a.square, state, count, vectors, v, random_square, true);
    if (high) store_four(high + flat, count, vectors, bits);
    if (a.remainder) store_four(a.remainder + state, count, vectors, low);
    if (a.param) store_four(a.param + at, count, vectors, p);
  }
}

void adamw_launch(Exec& exec, const AdamW& a) {
  UpdateArguments u{};
  u.param = static_cast<float*>(a.param.data);
  u.grad = static_cast<const float*>(a.grad.data);
  u.exp_avg = static_cast<float*>(a.exp_avg.data);
  u.exp_avg_sq = static_cast<float*>(a.exp_avg_sq.data);
  u.param_bf16 = static_cast<unsigned short*>(a.param_bf16.data);
  u.f16_copy = a.param_bf16.dtype == DType::f16;
  u.chunks = static_cast<const int64_t*>(a.chunks.data);
  u.n = a.grad.numel();
  u.scalars = static_cast<const double*>(a.scalars.data);
  if (!a.scalars) u.host = adamw_scalars(a);
  u.constants = {a.beta1, a.beta2, a.eps};
  std::copy(a.rates.begin(), a.rates.end(), u.rates);
  const int64_t chunks = a.chunks ? a.chunks.dim(0) : (u.n + adamw_chunk - 1) / adamw_chunk;
  const auto blocks = static_cast<unsigned>(chunks * blocks_per_chunk);
  const bool reduced = !a.param || a.grad.dtype != DType::f32 || a.exp_avg.dtype != DType::f32 ||
                       a.exp_avg_sq.dtype != DType::f32;
  if (reduced) {
    if (a.grad.dtype == DType::bf16) {
      u.grad = nullptr;
      u.grad_bf16 = static_cast<const unsigned short*>(a.grad.data);
    }
    u.remainder = static_cast<unsigned short*>(a.remainder.data);
    u.mean = {a.exp_avg.data, static_cast<unsigned char*>(a.exp_avg_scales.data), a.exp_avg.dtype};
    u.square = {a.exp_avg_sq.data, static_cast<unsigned char*>(a.exp_avg_sq_scales.data), a.exp_avg_sq.dtype};
    NRL_LAUNCH(update_reduced_kernel, blocks, threads, 0, exec.stream, u);
  } else if (a.param_bf16) {
    if (u.f16_copy)
      NRL_LAUNCH((update_kernel<true, true>), blocks, threads, 0, exec.stream, u);
    else
      NRL_LAUNCH((update_kernel<true, false>), blocks, threads, 0, exec.stream, u);
  } else {
    NRL_LAUNCH((update_kernel<false, false>), blocks, threads, 0, exec.stream, u);
  }
}

// --- sums in double --------------------------------------------------------------------------------------

__device__ __forceinline__ double square(float x) {
  const auto v = static_cast<double>(x);
  return v * v;
}

/// partial[b] = sum of squares of block b of norm_block elements.
template <class T>
__global__ void __launch_bounds__(threads)
    squares_kernel(const T* __restrict__ x, int64_t n, double* partial, int64_t blocks, bool vectors) {
  constexpr int ahead = 4, size = per_pack<T>;
  const int t = static_cast<int>(threadIdx.x);
  for (int64_t b = blockIdx.x; b < blocks; b += gridDim.x) {
    const T* from = x + b * norm_block;
    const int count = static_cast<int>(min(norm_block, n - b * norm_block));
    const int units = vectors ? count / size : 0;
    double sum = 0;
    for (int u = t; u < units; u += ahead * threads) {
      Pack<T> packs[ahead];
#pragma unroll
      for (int k = 0; k < ahead; ++k)
        if (u + k * threads < units) packs[k].load(from + (u + k * threads) * size);
#pragma unroll
      for (int k = 0; k < ahead; ++k) {
        if (u + k * threads >= units) continue;
        float v[size];
        packs[k].get(v);
#pragma unroll
        for (int e = 0; e < size; ++e) sum += square(v[e]);
      }
    }
    for (int i = units * size + t; i < count; i += threads) sum += square(static_cast<float>(from[i]));
    sum = block_sum_double(sum);
    if (t == 0) partial[b] = sum;
  }
}

constexpr int sum_threads = 1024;

/// out[0] = or += the sum of x; one block.
template <class T>
__global__ void __launch_bounds__(sum_threads)
    sum_kernel(const T* __restrict__ x, int64_t n, double* out, bool accumulate) {
  double sum = 0;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < n; i += sum_threads) sum += static_cast<double>(x[i]);
  sum = block_sum_double(sum);
  if (threadIdx.x == 0) *out = accumulate ? *out + sum : sum;
}

void squares_to(Exec& exec, Scratch& scratch, const Tensor& x, double* out, bool accumulate) {
  const int64_t n = x.numel(), blocks = (n + norm_block - 1) / norm_block;
  auto* partial = reinterpret_cast<double*>(scratch.bytes(scratch_bytes(blocks, sizeof(double))));
  const unsigned grid = grid_for(blocks, 1, exec.multiprocessors);
  if (x.dtype == DType::bf16) {
    NRL_LAUNCH((squares_kernel<bf16>), grid, threads, 0, exec.stream, static_cast<const bf16*>(x.data), n,
               partial, blocks, aligned16(x.data));
  } else {
    NRL_LAUNCH((squares_kernel<float>), grid, threads, 0, exec.stream, static_cast<const float*>(x.data), n,
               partial, blocks, aligned16(x.data));
  }
  NRL_LAUNCH((sum_kernel<double>), 1, sum_threads, 0, exec.stream, partial, blocks, out, accumulate);
}

void add_sum_of_squares_launch(Exec& exec, const SumOfSquares& a) {
  Scratch scratch("add_sum_of_squares", exec.workspace);
  squares_to(exec, scratch, a.x, static_cast<double*>(a.out.data), a.accumulate);
}

void add_sum_launch(Exec& exec, const AddSum& a) {
  NRL_LAUNCH((sum_kernel<float>), 1, sum_threads, 0, exec.stream, static_cast<const float*>(a.x.data),
             a.x.numel(), static_cast<double*>(a.out.data), true);
}

// --- element by element ----------------------------------------------------------------------------------

/// A thread's elements at a time: 16 bytes of bf16 or 32 of f32, because x and out may differ in type.
constexpr int unit_elements = 8;
/// Packs of a thread of convert_kernel in flight.
constexpr int convert_packs = 4;
/// Elements of a pack: at most 16 bytes on either side, so that the lanes of a warp access neighboring bytes,
/// because partly written sectors cost bandwidth.
template <class X, class O>
constexpr int convert_unit = per_pack<X> < per_pack<O> ? per_pack<X> : per_pack<O>;

/// out = x. x and out may be the same memory.
template <class X, class O>
__global__ void __launch_bounds__(threads) convert_kernel(const X* x, O* out, int64_t n, bool vectors) {
  constexpr int unit = convert_unit<X, O>;
  const int64_t units = vectors ? n / unit : 0,
                u = int64_t{blockIdx.x} * threads * convert_packs + threadIdx.x;
  Pack<X, unit> packs[convert_packs];
#pragma unroll
  for (int k = 0; k < convert_packs; ++k)
    if (u + k * threads < units) packs[k].load(x + (u + k * threads) * unit);
#pragma unroll
  for (int k = 0; k < convert_packs; ++k) {
    float v[unit];
    packs[k].get(v);
    if (u + k * threads < units) store_floats(out + (u + k * threads) * unit, v);
  }
  for (int64_t i = units * unit + int64_t{blockIdx.x} * threads + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * threads)
    out[i] = static_cast<O>(static_cast<float>(x[i]));
}

template <class X, class O>
void convert_as(Exec& exec, const Convert& a) {
  const int64_t n = a.x.numel();
  NRL_LAUNCH((convert_kernel<X, O>), blocks_for(n, threads * convert_packs * convert_unit<X, O>), threads, 0,
             exec.stream, static_cast<const X*>(a.x.data), static_cast<O*>(a.out.data), n,
             aligned16(a.x.data) && aligned16(a.out.data));
}

void convert_launch(Exec& exec, const Convert& a) {
  for_float_type(a.x.dtype, [&]<class X>() {
    for_float_type(a.out.dtype, [&]<class O>() { convert_as<X, O>(exec, a); });
  });
}

/// out = or += the sum of `parts` parts of n elements; parts are added in order.
template <class X, class O>
__global__ void __launch_bounds__(threads)
    parts_kernel(const X* __restrict__ x, O* __restrict__ out, int64_t parts, int64_t n, bool accumulate,
                 bool vectors) {
  const int64_t thread = int64_t{blockIdx.x} * threads + threadIdx.x, all = int64_t{gridDim.x} * threads;
  const int64_t units = vectors ? n / unit_elements : 0;
  for (int64_t u = thread; u < units; u += all) {
    float sum[unit_elements] = {}, v[unit_elements];
    if (accumulate) load_floats(out + u * unit_elements, sum);
    for (int64_t p = 0; p < parts; ++p) {
      load_floats(x + p * n + u * unit_elements, v);
#pragma unroll
      for (int e = 0; e < unit_elements; ++e) sum[e] = p == 0 && !accumulate ? v[e] : sum[e] + v[e];
    }
    store_floats(out + u * unit_elements, sum);
  }
  for (int64_t i = units * unit_elements + thread; i < n; i += all) {
    float sum = accumulate ? static_cast<float>(out[i]) : 0.0f;
    for (int64_t p = 0; p < parts; ++p) {
      const auto v = static_cast<float>(x[p * n + i]);
      sum = p == 0 && !accumulate ? v : sum + v;
    }
    out[i] = O(sum);
  }
}

template <class X, class O>
void sum_parts_as(Exec& exec, const SumParts& a) {
  const int64_t n = a.x.dim(1);
  const bool vectors =
      aligned16(a.x.data) && aligned16(a.out.data) && (a.x.dim(0) == 1 || n % unit_elements == 0);
  NRL_LAUNCH((parts_kernel<X, O>), grid_for(n, threads * unit_elements, exec.multiprocessors), threads, 0,
             exec.stream, static_cast<const X*>(a.x.data), static_cast<O*>(a.out.data), a.x.dim(0), n,
             a.accumulate, vectors);
}

void sum_parts_launch(Exec& exec, const SumParts& a) {
  for_f32_or_bf16(a.x.dtype, [&]<class X>() {
    for_f32_or_bf16(a.out.dtype, [&]<class O>() { sum_parts_as<X, O>(exec, a); });
  });
}

/// Used where there is no device::Runtime; ops::zero() has the device fill memory otherwise.
__global__ void __launch_bounds__(threads) zero_kernel(unsigned char* p, int64_t bytes, bool vectors) {
  const int64_t thread = int64_t{blockIdx.x} * threads + threadIdx.x, all = int64_t{gridDim.x} * threads;
  const int64_t whole = vectors ? bytes / 16 : 0;
  for (int64_t i = thread; i < whole; i += all) Pack<unsigned char>{}.store(p + i * 16);
  for (int64_t i = whole * 16 + thread; i < bytes; i += all) p[i] = 0;
}

void zero_launch(Exec& exec, const Zero& a) {
  NRL_LAUNCH(zero_kernel, grid_for(a.x.bytes(), threads * 64, exec.multiprocessors), threads, 0, exec.stream,
             static_cast<unsigned char*>(a.x.data), a.x.bytes(), aligned16(a.x.data));
}

// --- The decision ----------------------------------------------------------------------------------------

__global__ void decide_kernel(double* scalars, double max_norm, double beta1, double beta2,
                              int64_t max_skipped, int64_t growth_interval) {
  step::decide(scalars, max_norm, beta1, beta2, max_skipped, growth_interval);
}

void decide_launch(Exec& exec, const DecideStep& a) {
  NRL_LAUNCH(decide_kernel, 1, 1, 0, exec.stream, static_cast<double*>(a.scalars.data), a.max_norm, a.beta1,
             a.beta2, a.max_skipped, a.growth_interval);
}

}  // namespace

void fill_optimizer(KernelTable& table) {
  table.adamw = adamw_launch;
  table.add_sum_of_squares = add_sum_of_squares_launch;
  table.add_sum = add_sum_launch;
  table.convert = convert_launch;
  table.sum_parts = sum_parts_launch;
  table.zero = zero_launch;
  table.decide_step = decide_launch;
}

}  // namespace nrl::ops::NRL_GPU
