// Peak FLOP/s of one instruction set, measured on registers only.

#include "core/ops/kernel_table.h"
#include "core/ops/peak.h"

namespace nrl::ops::NRL_ISA {
namespace {

#if defined(NRL_ISA_avx512)
constexpr int lanes = 16;
constexpr bool fused = true;
#elif defined(NRL_ISA_avx2)
constexpr int lanes = 8;
constexpr bool fused = true;
#else
constexpr int lanes = 4;
constexpr bool fused = false;
#endif
typedef float Lanes __attribute__((vector_size(lanes * sizeof(float))));

/// Multiply-adds on registers only: enough independent chains to fill two units of latency 4, few enough
/// for 16 registers.
double fma_loop(int64_t rounds) {
  constexpr int chains = 12;
  Lanes x[chains];
  Lanes scale = Lanes{} + 0.999999f, shift = Lanes{} + 1e-6f;
  for (int c = 0; c < chains; ++c) x[c] = Lanes{} + static_cast<float>(c);
  for (int64_t r = 0; r < rounds; ++r) {
    asm volatile("" : "+v"(scale), "+v"(shift));  // keeps the compiler from folding rounds
#pragma GCC unroll 12
    for (int c = 0; c < chains; ++c) x[c] = x[c] * scale + shift;
  }
  float sum = 0;
  for (int c = 0; c < chains; ++c)
    for (int l = 0; l < lanes; ++l) sum += x[c][l];
  asm volatile("" : : "x"(sum));
  return 2.0 * chains * lanes * static_cast<double>(rounds);
}

}  // namespace

void fill_fma_probe(FmaProbe& probe) {
  probe = {fma_loop, lanes, fused};
}

}  // namespace nrl::ops::NRL_ISA
