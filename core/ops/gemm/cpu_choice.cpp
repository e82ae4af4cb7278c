#include "core/ops/cpu_choice.h"

#include <algorithm>

#include <spdlog/fmt/fmt.h>

#include "core/base/clock.h"
#include "core/ops/peak.h"

namespace nrl::ops {

namespace baseline {
void fill_fma_probe(FmaProbe& probe);
}
namespace avx2 {
void fill_fma_probe(FmaProbe& probe);
}
namespace avx512 {
void fill_fma_probe(FmaProbe& probe);
}
namespace avx512_bf16 {
void fill_fma_probe(FmaProbe& probe);
}
namespace avx512_amx {
void fill_fma_probe(FmaProbe& probe);
}

namespace {

/// The best of short slices of both loops in turn: an interrupted slice does not count.
double measure_bf16_rate(const FmaProbe& probe) {
  constexpr double slice = 0.0001;
  constexpr int slices = 8;
  double (*const loops[])(int64_t) = {probe.run, probe.run_bf16};
  int64_t rounds[2];
  for (int i = 0; i < 2; ++i) rounds[i] = rounds_that_last(loops[i], slice);
  double best[2] = {};
  for (int i = 0; i < 2 * slices; ++i) {
    const double begin = steady_seconds(), flops = loops[i % 2](rounds[i % 2]);
    best[i % 2] = std::max(best[i % 2], flops / (steady_seconds() - begin));
  }
  return best[1] / best[0];
}

}  // namespace

FmaProbe fma_probe(cpu::Isa isa) {
  FmaProbe probe;
  switch (isa) {
    case cpu::Isa::avx512_amx:
      avx512_amx::fill_fma_probe(probe);
      break;
    case cpu::Isa::avx512_bf16:
      avx512_bf16::fill_fma_probe(probe);
      break;
    case cpu::Isa::avx512:
      avx512::fill_fma_probe(probe);
      break;
    case cpu::Isa::avx2:
      avx2::fill_fma_probe(probe);
      break;
    case cpu::Isa::baseline:
      baseline::fill_fma_probe(probe);
      break;
  }
  return probe;
}

int64_t rounds_that_last(double (*loop)(int64_t rounds), double wanted) {
  for (int64_t rounds = 1000;; rounds *= 2) {
    const double begin = steady_seconds();
    loop(rounds);
    if (steady_seconds() - begin >= wanted || rounds > (int64_t{1} << 40)) return rounds;
  }
}

cpu::Isa fastest_isa(cpu::Isa usable, double bf16_rate, double amx_rate) {
  using enum cpu::Isa;
  if (usable >= avx512_amx && amx_rate >= std::max(native_rate, bf16_rate)) return avx512_amx;
  if (usable >= avx512_bf16 && bf16_rate >= native_rate) return avx512_bf16;
  return std::min(usable, avx512);
}

const CpuChoice& cpu_choice() {
  static const CpuChoice chosen = [] {
    CpuChoice choice{.usable = cpu::best_isa(), .amx_problem = cpu::amx().problem};
    if (cpu::amx().present && choice.amx_problem.empty() && choice.usable < cpu::Isa::avx512_amx)
      choice.amx_problem = "its kernels need AVX512_BF16, too";
    if (choice.usable == cpu::Isa::avx512_amx && !fma_probe(choice.usable).exact()) {
      choice.usable = cpu::Isa::avx512_bf16;
      choice.amx_problem = "it multiplies small integers wrongly";
    }
    if (choice.usable >= cpu::Isa::avx512_bf16)
      choice.bf16_rate = measure_bf16_rate(fma_probe(cpu::Isa::avx512_bf16));
    if (choice.usable >= cpu::Isa::avx512_amx)
      choice.amx_rate = measure_bf16_rate(fma_probe(cpu::Isa::avx512_amx));
    choice.isa = fastest_isa(choice.usable, choice.bf16_rate, choice.amx_rate);
    return choice;
  }();
  return chosen;
}

double bf16_rate(Bf16Products products) {
  const double rate = products == Bf16Products::amx      ? cpu_choice().amx_rate
                      : products == Bf16Products::native ? cpu_choice().bf16_rate
                                                         : 1;
  return std::max(rate, 1.0);
}

std::string bf16_reason(const CpuChoice& choice) {
  std::string text = choice.bf16_rate == 0
                         ? "the processor has no bf16 dot products (AVX512_BF16)"
                         : fmt::format("bf16 dot products run at {:.1f} times the rate of fp32 FMAs{}",
                                       choice.bf16_rate, choice.amx_rate == 0 ? " (measured)" : "");
  if (choice.amx_rate > 0) text += fmt::format(", AMX at {:.1f} times (measured)", choice.amx_rate);
  if (!choice.amx_problem.empty()) text += "; AMX is not used: " + choice.amx_problem;
  return text;
}

}  // namespace nrl::ops
