// nrl-train bench: what this machine does, beside its limits.

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <vector>

#include "apps/nrl-train/commands.h"
#include "core/base/log.h"
#include "core/device/cpu/features.h"
#include "core/device/cpu/memory.h"
#include "core/ops/kernel_table.h"
#include "core/ops/linear/peak.h"
#include "parallel/comm/bench.h"
#include "parallel/comm/world.h"

namespace nrl::app {
namespace {

double best_seconds(const std::function<void()>& work) {
  work();
  double best = 1e30, total = 0;
  for (int i = 0; i < 50 && total < 0.4; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    const double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    best = std::min(best, s);
    total += s;
  }
  return best;
}

// The three products of a linear layer at the shapes of the benchmark models: N tokens, M out, K in.
void bench_gemm() {
  const int threads = cpu::available_cores();
  ops::Exec exec;
  exec.kernels = &ops::cpu_kernels(cpu::best_isa());
  exec.threads = threads;
  const double peak = ops::measure_fma_peak(threads);
  log::info("fp32 peak {:.0f} GFLOP/s (register FMAs, {} threads, {})", peak, threads,
            cpu::name_of(cpu::best_isa()));
  log::info("{:>6} {:>6} {:>6}   {:>16} {:>16} {:>16}   GFLOP/s (share of peak)", "N", "M", "K", "forward",
            "data gradient", "weight gradient");
  const std::array<std::array<int64_t, 3>, 10> shapes{{{1024, 2304, 768},
                                                       {1024, 768, 768},
                                                       {1024, 3072, 768},
                                                       {1024, 768, 3072},
                                                       {256, 50304, 768},
                                                       {4096, 1152, 384},
                                                       {4096, 384, 384},
                                                       {4096, 2048, 384},
                                                       {4096, 384, 1024},
                                                       {1366, 8192, 384}}};
  for (const auto& [n, m, k] : shapes) {
    cpu::HostMemory memory(static_cast<size_t>(n * k + m * k * 2 + n * m * 2) * 4);
    auto* p = reinterpret_cast<float*>(memory.data());
    for (int64_t i = 0; i < n * k + m * k * 2 + n * m * 2; ++i) p[i] = static_cast<float>(i % 17) * 0.01f;
    const Tensor x = make_tensor(p, DType::f32, {n, k}), w = make_tensor(p + n * k, DType::f32, {m, k}),
                 dw = make_tensor(p + n * k + m * k, DType::f32, {m, k}),
                 y = make_tensor(p + n * k + 2 * m * k, DType::f32, {n, m});
    const Tensor dx = x;
    cpu::HostMemory scratch(ops::linear_workspace(n, m, k, DType::f32, threads));
    exec.workspace = {scratch.data(), scratch.size()};
    const double flops = ops::linear_flops(n, m, k) * 1e-9;
    const double forward = flops / best_seconds([&] { ops::linear_forward(exec, {x, w, {}, y}); });
    const double weight = flops / best_seconds([&] {
                            ops::linear_backward_weight(exec, {y, x, dw, {}, true});
                          });
    const double data = flops / best_seconds([&] { ops::linear_backward_data(exec, {y, w, dx, false}); });
    log::info("{:>6} {:>6} {:>6}   {:>8.0f} ({:>3.0f} %) {:>8.0f} ({:>3.0f} %) {:>8.0f} ({:>3.0f} %)", n, m,
              k, forward, forward / peak * 100, data, data / peak * 100, weight, weight / peak * 100);
  }
}

int bench_comm() {
  const auto world = comm::World::init();
  log::init(world->rank(), world->size());
  if (world->size() == 1) log::info("one rank: start it under mpirun to measure communication");
  const std::array<int64_t, 7> sizes{1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26};
  const auto timings = comm::comm_benchmark(world->comm(), sizes);
  log::line(comm::format_timings(timings));
  world->finalize();
  return 0;
}

}  // namespace

int run_bench(const BenchArgs& args) {
  if (args.what == "comm") return bench_comm();
  bench_gemm();
  return 0;
}

}  // namespace nrl::app
