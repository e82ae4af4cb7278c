#include "core/ops/optimizer/optimizer.h"

#include <cstring>

#include "core/device/cpu/parallel.h"
#include "core/ops/cpu_families.h"
#include "core/ops/element.h"
#include "core/ops/kernel_table.h"
#include "core/ops/simd.h"

namespace nrl::ops::NRL_ISA {
namespace {

constexpr int64_t grain_elements = 16384;
constexpr int64_t norm_block = 16384;

template <bool low, bool zero_grad>
void update(const element::AdamWStep s, float* __restrict p, float* __restrict g, float* __restrict m,
            float* __restrict v, bf16* __restrict copy, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const element::AdamWState x = element::adamw<SimdMath>(s, {p[i], m[i], v[i]}, g[i]);
    p[i] = x.param;
    m[i] = x.exp_avg;
    v[i] = x.exp_avg_sq;
    if constexpr (low) store(copy[i], x.param);
    if constexpr (zero_grad) g[i] = 0.0f;
  }
}

void adamw_kernel(Exec& exec, const AdamW& a) {
  const auto lr = static_cast<double>(a.lr);
  const auto steps = static_cast<double>(a.step);
  element::AdamWStep s;
  s.beta1 = a.beta1;
  s.beta2 = a.beta2;
  s.one_minus_beta1 = static_cast<float>(1.0 - static_cast<double>(a.beta1));
  s.one_minus_beta2 = static_cast<float>(1.0 - static_cast<double>(a.beta2));
  s.decay = static_cast<float>(1.0 - lr * static_cast<double>(a.weight_decay));
  s.step_size = static_cast<float>(lr / (1.0 - std::pow(static_cast<double>(a.beta1), steps)));
  s.inv_sqrt_correction2 =
      static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(static_cast<double>(a.beta2), steps)));
  s.eps = a.eps;
  s.grad_scale = a.grad_scale;
  cpu::parallel_for(exec.threads, a.param.numel(), grain_elements, [&](int64_t begin, int64_t end) {
    auto part = [&](auto run) {
      run(s, data_of<float>(a.param) + begin, data_of<float>(a.grad) + begin,
          data_of<float>(a.exp_avg) + begin, data_of<float>(a.exp_avg_sq) + begin,
          a.param_low ? data_of<bf16>(a.param_low) + begin : nullptr, end - begin);
    };
    if (a.param_low) {
      a.zero_grad ? part(update<true, true>) : part(update<true, false>);
    } else {
      a.zero_grad ? part(update<false, true>) : part(update<false, false>);
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

double sum_of_squares_kernel(Exec& exec, const Tensor& x) {
  return x.dtype == DType::bf16 ? squares<bf16>(exec, x) : squares<float>(exec, x);
}

/// out = op(out, x) element by element, for the four combinations of f32 and bf16.
template <bool accumulate>
void combine(Exec& exec, const Tensor& x, const Tensor& out) {
  for_float_type(x.dtype, [&]<class X>() {
    for_float_type(out.dtype, [&]<class O>() {
      const X* from = data_of<const X>(x);
      O* to = data_of<O>(out);
      cpu::parallel_for(exec.threads, x.numel(), grain_elements, [=](int64_t begin, int64_t end) {
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) {
          float value = static_cast<float>(from[i]);
          if constexpr (accumulate) value += static_cast<float>(to[i]);
          store(to[i], value);
        }
      });
    });
  });
}

void add_kernel(Exec& exec, const Tensor& x, const Tensor& out) {
  combine<true>(exec, x, out);
}
void convert_kernel(Exec& exec, const Tensor& x, const Tensor& out) {
  combine<false>(exec, x, out);
}

void zero_kernel(Exec& exec, const Tensor& x) {
  char* data = static_cast<char*>(x.data);
  cpu::parallel_for(exec.threads, x.bytes(), int64_t{1} << 18, [=](int64_t begin, int64_t end) {
    std::memset(data + begin, 0, static_cast<size_t>(end - begin));
  });
}

}  // namespace

void fill_optimizer(KernelTable& table) {
  table.adamw = adamw_kernel;
  table.sum_of_squares = sum_of_squares_kernel;
  table.add = add_kernel;
  table.convert = convert_kernel;
  table.zero = zero_kernel;
}

}  // namespace nrl::ops::NRL_ISA
