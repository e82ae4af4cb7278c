// The optimizer and the reductions around it on the GPU; formulas in core/ops/optimizer.h.
//
// update_kernel: four blocks per chunk; writes (=) param, exp_avg, exp_avg_sq and param_bf16.
// squares_kernel, sum_kernel: sums in double; a partial sum per norm_block elements (=, workspace), which one
// block adds up. convert_kernel: out = x. parts_kernel: out = or += the sum of parts. zero_kernel: clears
// memory. decide_kernel: one thread.

#include "core/device/kernel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/optimizer/adamw_step.h"
#include "core/ops/optimizer/decide_step.h"
#include "core/ops/shared/gpu/rows.cuh"
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

struct UpdateArguments {
  float *param, *exp_avg, *exp_avg_sq;
  const float* grad;
  bf16* param_bf16;
  const int64_t* chunks;  ///< null: the whole buffers, in chunks of adamw_chunk elements
  int64_t n;
  const double* scalars;  ///< null: `host`
  AdamWScalars host;
  AdamWConstants constants;
  AdamWRates rates[adamw_rates];
};

template <bool with_bf16>
__global__ void __launch_bounds__(threads) update_kernel(UpdateArguments a) {
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
  if (n <= 0) return;
  if (threadIdx.x == 0) {
    const AdamWScalars s = a.scalars ? adamw_scalars(a.scalars) : a.host;
    constants = adamw_step(s, a.constants, a.rates[rates]);
    skipped = s.skip;
  }
  __syncthreads();
  const element::AdamWStep s = constants;
  if (skipped != 0) return;

  float* __restrict__ p = a.param + (with_bf16 ? state : flat) + begin;
  const float* __restrict__ g = a.grad + flat + begin;
  float* __restrict__ m = a.exp_avg + state + begin;
  float* __restrict__ v = a.exp_avg_sq + state + begin;
  bf16* __restrict__ p_bf16 = with_bf16 ? a.param_bf16 + flat + begin : nullptr;

  auto address = [](const void* x) { return reinterpret_cast<uintptr_t>(x); };
  const bool vectors = ((address(p) | address(g) | address(m) | address(v)) % 16 | address(p_bf16) % 8) == 0;
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
    if constexpr (with_bf16) store_floats(p_bf16 + i, p4);
  }
  for (int i = whole + static_cast<int>(threadIdx.x); i < n; i += threads) {
    const element::AdamWState x = element::adamw<GpuMath>(s, {p[i], m[i], v[i]}, g[i]);
    p[i] = x.param;
    m[i] = x.exp_avg;
    v[i] = x.exp_avg_sq;
    if constexpr (with_bf16) p_bf16[i] = bf16(x.param);
  }
}

void adamw_launch(Exec& exec, const AdamW& a) {
  UpdateArguments u{};
  u.param = static_cast<float*>(a.param.data);
  u.grad = static_cast<const float*>(a.grad.data);
  u.exp_avg = static_cast<float*>(a.exp_avg.data);
  u.exp_avg_sq = static_cast<float*>(a.exp_avg_sq.data);
  u.param_bf16 = static_cast<bf16*>(a.param_bf16.data);
  u.chunks = static_cast<const int64_t*>(a.chunks.data);
  u.n = a.grad.numel();
  u.scalars = static_cast<const double*>(a.scalars.data);
  if (!a.scalars) u.host = adamw_scalars(a);
  u.constants = {a.beta1, a.beta2, a.eps};
  std::copy(a.rates.begin(), a.rates.end(), u.rates);
  const int64_t chunks = a.chunks ? a.chunks.dim(0) : (u.n + adamw_chunk - 1) / adamw_chunk;
  const auto blocks = static_cast<unsigned>(chunks * blocks_per_chunk);
  if (a.param_bf16) {
    NRL_LAUNCH((update_kernel<true>), blocks, threads, 0, exec.stream, u);
  } else {
    NRL_LAUNCH((update_kernel<false>), blocks, threads, 0, exec.stream, u);
  }
}

// --- sums in double --------------------------------------------------------------------------------------

/// Sum over the block in thread 0; every thread must call it.
__device__ __forceinline__ double block_sum_double(double v) {
  NRL_SHARED(double, part, [32]);
  const int lane = threadIdx.x % warp, w = threadIdx.x / warp, warps = blockDim.x / warp;
#pragma unroll
  for (int o = warp / 2; o; o >>= 1) v += __shfl_xor_sync(all_lanes, v, o);
  if (lane == 0) part[w] = v;
  __syncthreads();
  v = 0.0;
  if (threadIdx.x == 0)
    for (int i = 0; i < warps; ++i) v += part[i];
  __syncthreads();
  return v;
}

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

/// out = x. x and out may be the same memory.
template <class X, class O>
__global__ void __launch_bounds__(threads) convert_kernel(const X* x, O* out, int64_t n, bool vectors) {
  const int64_t thread = int64_t{blockIdx.x} * threads + threadIdx.x, all = int64_t{gridDim.x} * threads;
  const int64_t units = vectors ? n / unit_elements : 0;
  for (int64_t u = thread; u < units; u += 2 * all) {
    const bool second = u + all < units;
    float a[unit_elements], b[unit_elements] = {};
    load_floats(x + u * unit_elements, a);
    if (second) load_floats(x + (u + all) * unit_elements, b);
    store_floats(out + u * unit_elements, a);
    if (second) store_floats(out + (u + all) * unit_elements, b);
  }
  for (int64_t i = units * unit_elements + thread; i < n; i += all)
    out[i] = static_cast<O>(static_cast<float>(x[i]));
}

template <class X, class O>
void convert_as(Exec& exec, const Convert& a) {
  const int64_t n = a.x.numel();
  NRL_LAUNCH((convert_kernel<X, O>), grid_for(n, threads * unit_elements, exec.multiprocessors), threads, 0,
             exec.stream, static_cast<const X*>(a.x.data), static_cast<O*>(a.out.data), n,
             aligned16(a.x.data) && aligned16(a.out.data));
}

void convert_launch(Exec& exec, const Convert& a) {
  const bool to_bf16 = a.out.dtype == DType::bf16;
  if (a.x.dtype == DType::bf16) {
    to_bf16 ? convert_as<bf16, bf16>(exec, a) : convert_as<bf16, float>(exec, a);
  } else {
    to_bf16 ? convert_as<float, bf16>(exec, a) : convert_as<float, float>(exec, a);
  }
}

/// out = or += the sum of `parts` parts of n elements; parts are added in order.
template <class X>
__global__ void __launch_bounds__(threads)
    parts_kernel(const X* __restrict__ x, float* __restrict__ out, int64_t parts, int64_t n, bool accumulate,
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
    float sum = accumulate ? out[i] : 0.0f;
    for (int64_t p = 0; p < parts; ++p) {
      const auto v = static_cast<float>(x[p * n + i]);
      sum = p == 0 && !accumulate ? v : sum + v;
    }
    out[i] = sum;
  }
}

template <class X>
void sum_parts_as(Exec& exec, const SumParts& a) {
  const int64_t n = a.x.dim(1);
  const bool vectors =
      aligned16(a.x.data) && aligned16(a.out.data) && (a.x.dim(0) == 1 || n % unit_elements == 0);
  NRL_LAUNCH((parts_kernel<X>), grid_for(n, threads * unit_elements, exec.multiprocessors), threads, 0,
             exec.stream, static_cast<const X*>(a.x.data), static_cast<float*>(a.out.data), a.x.dim(0), n,
             a.accumulate, vectors);
}

void sum_parts_launch(Exec& exec, const SumParts& a) {
  a.x.dtype == DType::bf16 ? sum_parts_as<bf16>(exec, a) : sum_parts_as<float>(exec, a);
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
                              int64_t max_skipped) {
  step::decide(scalars, max_norm, beta1, beta2, max_skipped);
}

void decide_launch(Exec& exec, const DecideStep& a) {
  NRL_LAUNCH(decide_kernel, 1, 1, 0, exec.stream, static_cast<double*>(a.scalars.data), a.max_norm, a.beta1,
             a.beta2, a.max_skipped);
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
