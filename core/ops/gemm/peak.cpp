#include "core/ops/peak.h"

#include <algorithm>

#include "core/base/clock.h"
#include "core/device/cpu/features.h"
#include "core/device/cpu/memory.h"
#include "core/device/cpu/parallel.h"
#include "core/ops/cpu_choice.h"
#include "core/ops/kernel_table.h"
#include "core/ops/linear.h"

namespace nrl::ops {

namespace {

constexpr int64_t size = 768;
constexpr size_t operand_bytes = 3 * size * size * sizeof(float);

}  // namespace

int64_t gemm_peak_bytes(int threads) {
  const Bf16Products products = cpu_kernels(cpu_choice().isa).bf16_products;
  return static_cast<int64_t>(operand_bytes +
                              linear_workspace(size, size, size, DType::f32, threads, products));
}

double measure_gemm_peak(int threads, double budget) {
  cpu::HostMemory memory(static_cast<size_t>(gemm_peak_bytes(threads)));
  float* a = reinterpret_cast<float*>(memory.data());
  // Small varied values: a GEMM of zeros draws less power and runs at a higher clock on some processors.
  for (int64_t i = 0; i < 3 * size * size; ++i) a[i] = static_cast<float>(i % 61) * 0.01f - 0.3f;
  const auto matrix = [a](int i) { return make_tensor(a + i * size * size, DType::f32, {size, size}); };
  const LinearForward gemm{.x = matrix(0), .weight = matrix(1), .out = matrix(2)};
  Exec exec{.kernels = &cpu_kernels(cpu_choice().isa), .threads = threads};
  exec.workspace = {memory.data() + operand_bytes, memory.size() - operand_bytes};
  const double flops = linear_flops(size, size, size);
  double best = 0;
  const double start = steady_seconds();
  // At least three GEMMs, however slow: the first one touches its memory.
  for (int i = 0; i < 3 || steady_seconds() - start < budget; ++i) {
    const double begin = steady_seconds();
    exec.kernels->linear_forward(exec, gemm);
    best = std::max(best, flops / (steady_seconds() - begin));
  }
  return best * 1e-9;
}

double measure_fma_peak(int threads, double budget) {
  const FmaProbe probe = fma_probe(cpu::best_isa());
  constexpr double slice = 0.001;
  const int64_t rounds = rounds_that_last(probe.run, slice / 2);
  double best = 0;
  const double start = steady_seconds();
  while (best == 0 || steady_seconds() - start < budget) {
    double flops = 0, begin = 0;
#pragma omp parallel num_threads(threads) reduction(+ : flops)
    {
#pragma omp barrier
#pragma omp master
      begin = steady_seconds();
      flops += probe.run(rounds);
    }
    best = std::max(best, flops / (steady_seconds() - begin));
  }
  return best * 1e-9;
}

}  // namespace nrl::ops
