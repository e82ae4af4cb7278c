// Token log-probabilities and their gradient on the CPU, rows split over the threads:
//   lse = row_max + log(sum(exp(x - row_max))),   log_prob = x[target] - lse
//   gradient: weight * (onehot(target) - softmax(x)), written (=) over the logits or to dlogits

#include <cstring>

#include "core/device/cpu/parallel.h"
#include "core/ops/cross_entropy.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/cpu/simd.h"

namespace nrl::ops::NRL_ISA {
namespace {

/// Sums run in f32 over this many elements and in double over the blocks.
constexpr int64_t block = 2048;

float maximum(const float* x, int64_t n) {
  float m = x[0];
#pragma omp simd reduction(max : m)
  for (int64_t i = 0; i < n; ++i) m = x[i] > m ? x[i] : m;
  return m;
}

/// Sum of exp(x - m); `keep` writes the exponentials over x.
template <bool keep>
double exponentials(float* x, int64_t n, float m) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += block) {
    const int64_t end = std::min(n, begin + block);
    float s = 0;
#pragma omp simd reduction(+ : s)
    for (int64_t i = begin; i < end; ++i) {
      const float e = exp_f32(x[i] - m);
      if constexpr (keep) x[i] = e;
      s += e;
    }
    total += static_cast<double>(s);
  }
  return total;
}

/// out = bf16(x * scale). `out` may be the first half of x's memory: a block is read before it is written.
void scale_to_bf16(const float* x, int64_t n, float scale, bf16* out) {
  bf16 rounded[block];
  for (int64_t begin = 0; begin < n; begin += block) {
    const int64_t count = std::min(n - begin, block);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) store(rounded[i], x[begin + i] * scale);
    std::memcpy(static_cast<void*>(out + begin), rounded, static_cast<size_t>(count) * sizeof(bf16));
  }
}

void cross_entropy_kernel(Exec& exec, const CrossEntropy& a) {
  const int64_t n = a.logits.dim(0), v = a.logits.dim(1);
  const int32_t* targets = data_of<const int32_t>(a.target);
  const float* weights = data_of<const float>(a.weight);
  float* log_probs = data_of<float>(a.log_prob);
  float* lses = data_of<float>(a.lse);
  cpu::parallel_for(exec.threads, n, std::max<int64_t>(1, 8192 / v), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* x = data_of<float>(a.logits) + r * a.logits.stride[0];
      bf16* dlogits = a.dlogits ? data_of<bf16>(a.dlogits) + r * a.dlogits.stride[0] : nullptr;
      const int32_t target = targets[r];
      const float weight = weights && target >= 0 ? weights[r] : 0.0f;
      if (target < 0 && !lses) {
        log_probs[r] = 0.0f;
      } else {
        const float row_max = maximum(x, v), x_target = target >= 0 ? x[target] : 0.0f;
        const double total =
            weight != 0.0f ? exponentials<true>(x, v, row_max) : exponentials<false>(x, v, row_max);
        const double lse = static_cast<double>(row_max) + std::log(total);
        log_probs[r] = target >= 0 ? static_cast<float>(static_cast<double>(x_target) - lse) : 0.0f;
        if (lses) lses[r] = static_cast<float>(lse);
        if (weight != 0.0f) {
          const float scale = static_cast<float>(-static_cast<double>(weight) / total);
          const float at_target = x[target] * scale + weight;
          if (dlogits) {
            scale_to_bf16(x, v, scale, dlogits);
            store(dlogits[target], at_target);
          } else {
#pragma omp simd
            for (int64_t i = 0; i < v; ++i) x[i] *= scale;
            x[target] = at_target;
          }
        }
      }
      if (weights && weight == 0.0f)
        dlogits ? std::fill(dlogits, dlogits + v, bf16()) : std::fill(x, x + v, 0.0f);
    }
  });
}

}  // namespace

void fill_cross_entropy(KernelTable& table) {
  table.cross_entropy = cross_entropy_kernel;
}

}  // namespace nrl::ops::NRL_ISA
