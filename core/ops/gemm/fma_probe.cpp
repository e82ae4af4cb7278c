// Peak FLOP/s of one instruction set, measured on registers only.

#if defined(NRL_ISA_avx512_bf16)
#include <immintrin.h>
#endif

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

#if defined(NRL_ISA_avx512_bf16)
/// As fma_loop, with chains for two units of latency 6 and 32 registers.
double bf16_loop(int64_t rounds) {
  constexpr int chains = 24;
  __m512 x[chains];
  __m512 scale = _mm512_set1_ps(0.001f), shift = _mm512_set1_ps(1e-6f);
#pragma GCC unroll 24
  for (int c = 0; c < chains; ++c) x[c] = _mm512_set1_ps(static_cast<float>(c));
  for (int64_t r = 0; r < rounds; ++r) {
    asm volatile("" : "+v"(scale), "+v"(shift));
#pragma GCC unroll 24
    for (int c = 0; c < chains; ++c)
      x[c] = _mm512_dpbf16_ps(x[c], reinterpret_cast<__m512bh>(scale), reinterpret_cast<__m512bh>(shift));
  }
  Lanes sum = {};
#pragma GCC unroll 24
  for (int c = 0; c < chains; ++c) sum += x[c];
  asm volatile("" : : "v"(sum));
  return 4.0 * chains * lanes * static_cast<double>(rounds);
}
#else
constexpr double (*bf16_loop)(int64_t) = nullptr;
#endif

}  // namespace

void fill_fma_probe(FmaProbe& probe) {
  probe = {fma_loop, bf16_loop, lanes, fused};
}

}  // namespace nrl::ops::NRL_ISA
