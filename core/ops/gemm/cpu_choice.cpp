#include "core/ops/cpu_choice.h"

#include <algorithm>
#include <chrono>

#include <spdlog/fmt/fmt.h>

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

namespace {

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// The best of short slices of both loops in turn: an interrupted slice does not count.
double measure_bf16_rate(const FmaProbe& probe) {
  constexpr double slice = 0.0001;
  constexpr int slices = 24;
  double (*const loops[])(int64_t) = {probe.run, probe.run_bf16};
  int64_t rounds[2];
  for (int i = 0; i < 2; ++i) rounds[i] = rounds_that_last(loops[i], slice);
  double best[2] = {};
  for (int i = 0; i < 2 * slices; ++i) {
    const double begin = seconds(), flops = loops[i % 2](rounds[i % 2]);
    best[i % 2] = std::max(best[i % 2], flops / (seconds() - begin));
  }
  return best[1] / best[0];
}

}  // namespace

FmaProbe fma_probe(cpu::Isa isa) {
  FmaProbe probe;
  switch (isa) {
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
    const double begin = seconds();
    loop(rounds);
    if (seconds() - begin >= wanted || rounds > (int64_t{1} << 40)) return rounds;
  }
}

const CpuChoice& cpu_choice() {
  static const CpuChoice chosen = [] {
    CpuChoice choice{.isa = cpu::best_isa(), .amx = cpu::has_amx_bf16()};
    if (choice.isa < cpu::Isa::avx512_bf16) return choice;
    choice.bf16_rate = measure_bf16_rate(fma_probe(choice.isa));
    if (choice.bf16_rate < native_rate) choice.isa = cpu::Isa::avx512;
    return choice;
  }();
  return chosen;
}

std::string bf16_reason(const CpuChoice& choice) {
  const char* const amx = choice.amx ? "; AMX is not used" : "";
  if (choice.bf16_rate == 0)
    return fmt::format("the processor has no bf16 dot products (AVX512_BF16){}", amx);
  return fmt::format("bf16 dot products run at {:.1f} times the rate of fp32 FMAs (measured){}",
                     choice.bf16_rate, amx);
}

}  // namespace nrl::ops
