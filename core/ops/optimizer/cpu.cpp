// The optimizer and the reductions around it on the CPU; formulas in core/ops/optimizer.h. Elements are split
// over the threads; sums are made of partial sums per norm_block elements, added in order.

#include <cstring>
#include <type_traits>

#include "core/device/cpu/parallel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/optimizer.h"
#include "core/ops/optimizer/adamw_step.h"
#include "core/ops/optimizer/decide_step.h"
#include "core/ops/shared/cpu/simd.h"
#include "core/ops/shared/moments.h"

namespace nrl::ops::NRL_ISA {
namespace {

constexpr int64_t grain_elements = 16384;

/// The bits of a weight in the type that the layers read, f16 or bf16.
template <bool f16_copy>
NRL_INLINE uint16_t copy_of(float x) {
  return f16_copy ? f16::round(x) : moments::split(x).high;
}

/// `copy`: none, or weights in a type of 16 bits.
template <bool with_copy, bool f16_copy>
void update(const element::AdamWStep s, float* __restrict p, const float* __restrict g, float* __restrict m,
            float* __restrict v, uint16_t* __restrict copy, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const element::AdamWState x = element::adamw<SimdMath>(s, {p[i], m[i], v[i]}, g[i]);
    p[i] = x.param;
    m[i] = x.exp_avg;
    v[i] = x.exp_avg_sq;
    if constexpr (with_copy) copy[i] = copy_of<f16_copy>(x.param);
  }
}

// --- state in reduced formats
// -------------------------------------------------------------------------------

/// Elements that are converted at a time, in the L1 cache.
constexpr int64_t window = 512;
static_assert(window % moment_block == 0 && adamw_chunk % window == 0);

template <DType format>
using Code = std::conditional_t<format == DType::f16, uint16_t, uint8_t>;

template <DType format>
void decode(const void* from, const uint8_t* scales, float* __restrict out, int64_t n) {
  for (int64_t at = 0; at < n; at += moment_block) {
    const auto* codes = static_cast<const Code<format>*>(from) + at;
    const float scale = fp8::scale_value(scales[at / moment_block]);
    const int64_t count = std::min(moment_block, n - at);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) out[at + i] = moments::decode<format>(codes[i]) * scale;
  }
}

template <DType format>
void encode(const float* __restrict x, const uint32_t* __restrict random, void* to, uint8_t* scales,
            bool nonzero, int64_t n) {
  for (int64_t at = 0; at < n; at += moment_block) {
    auto* codes = static_cast<Code<format>*>(to) + at;
    const int64_t count = std::min(moment_block, n - at);
    uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < count; ++i)
      largest = std::max(largest, moments::bits_of(x[at + i]) & fp8::magnitude_bits);
    const uint32_t byte = fp8::scale_of<format>(largest);
    const float inverse = fp8::inverse_scale(byte);
    scales[at / moment_block] = static_cast<uint8_t>(byte);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i)
      codes[i] =
          static_cast<Code<format>>(moments::encode<format>(x[at + i] * inverse, random[at + i], nonzero));
  }
}

/// A moment's elements from `at` on. `x`: where they are in fp32, in the buffer or in place.
struct Moment {
  Moment(const Tensor& values, const Tensor& scales, int64_t at)
      : dtype(values.dtype),
        data(static_cast<char*>(values.data) + at * size_of(values.dtype)),
        scales(scales ? data_of<uint8_t>(scales) + at / moment_block : nullptr) {}

  float* read(float* __restrict buffer, int64_t n) const {
    switch (dtype) {
      case DType::f16:
        decode<DType::f16>(data, scales, buffer, n);
        return buffer;
      case DType::e4m3:
        decode<DType::e4m3>(data, scales, buffer, n);
        return buffer;
      case DType::bf16: {
        const auto* from = static_cast<const uint16_t*>(data);
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) buffer[i] = moments::float_of(static_cast<uint32_t>(from[i]) << 16);
        return buffer;
      }
      default:
        return static_cast<float*>(data);
    }
  }
  void write(const float* __restrict x, const uint32_t* __restrict random, bool nonzero, int64_t n) const {
    switch (dtype) {
      case DType::f16:
        return encode<DType::f16>(x, random, data, scales, nonzero, n);
      case DType::e4m3:
        return encode<DType::e4m3>(x, random, data, scales, nonzero, n);
      case DType::bf16: {
        auto* to = static_cast<uint16_t*>(data);
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) to[i] = static_cast<uint16_t>(moments::encode_bf16(x[i], random[i]));
        return;
      }
      default:
        return;  // in place
    }
  }

  DType dtype;
  void* data;
  uint8_t* scales;
};

/// n gradients in fp32, in the buffer or in place.
const float* read_gradients(const Tensor& grad, int64_t at, float* __restrict buffer, int64_t n) {
  if (grad.dtype == DType::f32) return data_of<const float>(grad) + at;
  const auto* from = data_of<const uint16_t>(grad) + at;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) buffer[i] = moments::float_of(static_cast<uint32_t>(from[i]) << 16);
  return buffer;
}

/// Fewer than `window` elements, all at multiples of it from the beginning of a chunk.
void update_window(const AdamW& a, const element::AdamWStep s, int64_t flat, int64_t state, int64_t n) {
  alignas(64) float params[window], means[window], squares[window];
  alignas(64) uint32_t random_mean[window], random_square[window];
  alignas(64) float gradients[window];
  const float* __restrict g = read_gradients(a.grad, flat, gradients, n);
  uint16_t* __restrict high = a.param_bf16 ? data_of<uint16_t>(a.param_bf16) + flat : nullptr;
  uint16_t* __restrict low = a.remainder ? data_of<uint16_t>(a.remainder) + state : nullptr;
  const Moment exp_avg(a.exp_avg, a.exp_avg_scales, state);
  const Moment exp_avg_sq(a.exp_avg_sq, a.exp_avg_sq_scales, state);
  float* __restrict m = exp_avg.read(means, n);
  float* __restrict v = exp_avg_sq.read(squares, n);
  float* __restrict p = params;
  if (low) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) p[i] = moments::join({high[i], low[i]});
  } else if (!a.param) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) p[i] = moments::float_of(static_cast<uint32_t>(high[i]) << 16);
  } else {
    p = data_of<float>(a.param) + (high ? state : flat);
  }
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const element::AdamWState x = element::adamw<SimdMath>(s, {p[i], m[i], v[i]}, g[i]);
    p[i] = x.param;
    m[i] = x.exp_avg;
    v[i] = x.exp_avg_sq;
  }
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    random_mean[i] = moments::random_bits(s.seed, g[i], m[i]);
    random_square[i] = moments::random_bits(~s.seed, g[i], v[i]);
  }
  exp_avg.write(m, random_mean, false, n);
  exp_avg_sq.write(v, random_square, true, n);
  if (!a.param && !low) {
    const uint32_t seed = moments::seed_of_weights(s.seed);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i)
      high[i] = static_cast<uint16_t>(moments::encode_bf16(p[i], moments::random_bits(seed, g[i], p[i])));
  } else if (high && a.param_bf16.dtype == DType::f16) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) high[i] = copy_of<true>(p[i]);
  } else if (high) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) high[i] = copy_of<false>(p[i]);
  }
  if (low) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) low[i] = moments::split(p[i]).low;
  }
}

bool is_reduced(const AdamW& a) {
  return !a.param || a.grad.dtype != DType::f32 || a.exp_avg.dtype != DType::f32 ||
         a.exp_avg_sq.dtype != DType::f32;
}

/// n elements, at `flat` of grad and param_bf16 and at `state` of the other buffers.
void update_piece(const AdamW& a, const element::AdamWStep& s, int64_t flat, int64_t state, int64_t n) {
  if (is_reduced(a)) {
    for (int64_t at = 0; at < n; at += window)
      update_window(a, s, flat + at, state + at, std::min(window, n - at));
    return;
  }
  const float* grad = data_of<const float>(a.grad) + flat;
  uint16_t* copy = a.param_bf16 ? data_of<uint16_t>(a.param_bf16) + flat : nullptr;
  auto* run = !copy                              ? update<false, false>
              : a.param_bf16.dtype == DType::f16 ? update<true, true>
                                                 : update<true, false>;
  run(s, data_of<float>(a.param) + (copy ? state : flat), grad, data_of<float>(a.exp_avg) + state,
      data_of<float>(a.exp_avg_sq) + state, copy, n);
}

void adamw_kernel(Exec& exec, const AdamW& a) {
  const AdamWScalars scalars = a.scalars ? adamw_scalars(data_of<const double>(a.scalars)) : adamw_scalars(a);
  if (scalars.skip) return;
  std::array<element::AdamWStep, adamw_rates> steps;
  for (size_t i = 0; i < steps.size(); ++i)
    steps[i] = adamw_step(scalars, {a.beta1, a.beta2, a.eps}, a.rates[i]);
  if (!a.chunks) {
    const int64_t n = a.grad.numel(), blocks = moment_blocks(n);
    constexpr int64_t grain = grain_elements / moment_block;
    cpu::parallel_for(exec.threads, blocks, grain, [&](int64_t begin, int64_t end) {
      const int64_t first = begin * moment_block;
      update_piece(a, steps[0], first, first, std::min(end * moment_block, n) - first);
    });
    return;
  }
  const int64_t* chunk = data_of<const int64_t>(a.chunks);
  cpu::parallel_for(exec.threads, a.chunks.dim(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      const int64_t* row = chunk + 4 * c;
      update_piece(a, steps[static_cast<size_t>(row[3])], row[0], row[1], row[2]);
    }
  });
}

template <class T>
double block_squares(const T* x, int64_t n) {
  double s = 0;
#pragma omp simd reduction(+ : s)
  for (int64_t i = 0; i < n; ++i) {
    const double v = static_cast<double>(static_cast<float>(x[i]));
    s += v * v;
  }
  return s;
}

template <class T>
double squares(Exec& exec, const Tensor& t) {
  // A fixed number of block sums lives on the stack, so that nothing is allocated.
  constexpr int64_t batch = 2048;
  double sums[batch];
  const T* x = data_of<const T>(t);
  const int64_t n = t.numel(), blocks = (n + norm_block - 1) / norm_block;
  double total = 0;
  for (int64_t base = 0; base < blocks; base += batch) {
    const int64_t count = std::min(batch, blocks - base);
    cpu::parallel_for(exec.threads, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        const int64_t at = (base + b) * norm_block;
        sums[b] = block_squares(x + at, std::min(norm_block, n - at));
      }
    });
    for (int64_t b = 0; b < count; ++b) total += sums[b];
  }
  return total;
}

void add_sum_of_squares_kernel(Exec& exec, const SumOfSquares& a) {
  double* out = data_of<double>(a.out);
  const double total = a.x.dtype == DType::bf16 ? squares<bf16>(exec, a.x) : squares<float>(exec, a.x);
  *out = a.accumulate ? *out + total : total;
}

void add_sum_kernel(Exec&, const AddSum& a) {
  const float* x = data_of<const float>(a.x);
  const int64_t n = a.x.numel();
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += norm_block) {
    const int64_t end = std::min(n, begin + norm_block);
    double s = 0;
#pragma omp simd reduction(+ : s)
    for (int64_t i = begin; i < end; ++i) s += static_cast<double>(x[i]);
    total += s;
  }
  *data_of<double>(a.out) += total;
}

void convert_kernel(Exec& exec, const Convert& a) {
  for_float_type(a.x.dtype, [&]<class X>() {
    for_float_type(a.out.dtype, [&]<class O>() {
      const X* from = data_of<const X>(a.x);
      O* to = data_of<O>(a.out);
      cpu::parallel_for(exec.threads, a.x.numel(), grain_elements, [=](int64_t begin, int64_t end) {
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) store(to[i], static_cast<float>(from[i]));
      });
    });
  });
}

void sum_parts_kernel(Exec& exec, const SumParts& a) {
  for_f32_or_bf16(a.x.dtype, [&]<class X>() {
    const X* from = data_of<const X>(a.x);
    float* to = data_of<float>(a.out);
    bf16* rounded = a.out.dtype == DType::bf16 ? data_of<bf16>(a.out) : nullptr;
    const int64_t parts = a.x.dim(0), n = a.x.dim(1);
    const bool accumulate = a.accumulate;
    cpu::parallel_for(exec.threads, n, grain_elements, [=](int64_t begin, int64_t end) {
      // In blocks that stay in the cache from part to part.
      constexpr int64_t block = 2048;
      float sums[block];
      for (int64_t at = begin; at < end; at += block) {
        const int64_t count = std::min(block, end - at);
        float* const sum = rounded ? sums : to + at;
        if (rounded && accumulate) {
#pragma omp simd
          for (int64_t i = 0; i < count; ++i) sum[i] = static_cast<float>(rounded[at + i]);
        }
        for (int64_t p = 0; p < parts; ++p) {
          const X* part = from + p * n + at;
          if (p == 0 && !accumulate) {
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) sum[i] = static_cast<float>(part[i]);
          } else {
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) sum[i] += static_cast<float>(part[i]);
          }
        }
        if (rounded) {
#pragma omp simd
          for (int64_t i = 0; i < count; ++i) store(rounded[at + i], sum[i]);
        }
      }
    });
  });
}

void zero_kernel(Exec& exec, const Zero& a) {
  char* data = static_cast<char*>(a.x.data);
  cpu::parallel_for(exec.threads, a.x.bytes(), int64_t{1} << 18, [=](int64_t begin, int64_t end) {
    std::memset(data + begin, 0, static_cast<size_t>(end - begin));
  });
}

}  // namespace

void fill_optimizer(KernelTable& table) {
  table.adamw = adamw_kernel;
  table.add_sum_of_squares = add_sum_of_squares_kernel;
  table.add_sum = add_sum_kernel;
  table.convert = convert_kernel;
  table.sum_parts = sum_parts_kernel;
  table.zero = zero_kernel;
  table.decide_step = [](Exec&, const DecideStep& a) {
    step::decide(static_cast<double*>(a.scalars.data), a.max_norm, a.beta1, a.beta2, a.max_skipped,
                 a.growth_interval);
  };
}

}  // namespace nrl::ops::NRL_ISA
