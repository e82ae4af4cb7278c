// Peak FLOP/s of one instruction set, measured on registers only.

#if defined(NRL_ISA_avx512_amx)
#include <algorithm>
#include <bit>

#include "core/ops/gemm/tiles_amx.h"
#include "core/ops/gemm/tiles_emulated.h"
#elif defined(NRL_ISA_avx512_bf16)
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

#if defined(NRL_ISA_avx512_amx)
/// A tile of floats, or of pairs of bf16.
struct alignas(64) Tile {
  float value[16][16];
};

/// Pairs of bf16 that are small integers, different in each element and for each `salt`.
Tile small_integers(int salt) {
  const auto integer = [salt](int i) {
    return std::bit_cast<uint32_t>(static_cast<float>((i * 7 + i / 32 * 5 + salt) % 31 - 15));
  };
  Tile t;
  for (int i = 0; i < 256; ++i)
    t.value[i / 16][i % 16] = std::bit_cast<float>(integer(2 * i) >> 16 | integer(2 * i + 1));
  return t;
}

/// Twice a b.
template <class T>
Tile product(const Tile& a, const Tile& b) {
  Tile c;
  T::configure();
  T::template load<4>(a.value[0], 16);
  T::template load<6>(b.value[0], 16);
  T::template zero<1>();
  T::template multiply_add<1, 4, 6>();
  T::template multiply_add<1, 4, 6>();
  T::template store<1>(c.value[0], 16);
  T::release();
  return c;
}

constexpr bool (*exact)() = [] {
  const Tile a = small_integers(1), b = small_integers(2);
  const Tile c = product<Tiles>(a, b), wanted = product<EmulatedTiles>(a, b);
  return std::equal(&c.value[0][0], &c.value[0][0] + 256, &wanted.value[0][0]);
};

/// Products of the tiles that the GEMM kernel uses: four sums hide the latency.
double bf16_loop(int64_t rounds) {
  const Tile a = small_integers(1), b = small_integers(2);
  Tiles::configure();
  Tiles::load<4>(a.value[0], 16);
  Tiles::load<5>(b.value[0], 16);
  Tiles::load<6>(a.value[0], 16);
  Tiles::load<7>(b.value[0], 16);
  for (int64_t r = 0; r < rounds; ++r) {
    Tiles::multiply_add<0, 4, 6>();
    Tiles::multiply_add<1, 4, 7>();
    Tiles::multiply_add<2, 5, 6>();
    Tiles::multiply_add<3, 5, 7>();
  }
  Tiles::release();
  return 4.0 * 2 * 16 * 16 * 32 * static_cast<double>(rounds);
}
#elif defined(NRL_ISA_avx512_bf16)
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
#if !defined(NRL_ISA_avx512_amx)
constexpr bool (*exact)() = nullptr;
#endif

}  // namespace

void fill_fma_probe(FmaProbe& probe) {
  probe = {fma_loop, bf16_loop, exact, lanes, fused};
}

}  // namespace nrl::ops::NRL_ISA
