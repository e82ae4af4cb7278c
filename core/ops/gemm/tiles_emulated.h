#pragma once
// The operations of tiles_amx.h in C++, after the pseudocode of Intel's manual, for the check of the
// processor at start-up (fma_probe.cpp) and for tests on processors without AMX.

#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/base/error.h"

namespace nrl::ops::NRL_ISA {

class EmulatedTiles {
 public:
  static void configure() {
    NRL_CHECK(!state().configured, "the tiles of this thread were not released");
    state() = {.configured = true};
  }
  static void release() {
    configured();
    state().configured = false;
  }
  template <int tile>
  static void zero() {
    std::memset(configured().tile[tile], 0, sizeof(Tile));
  }
  template <int tile>
  static void load(const float* from, int64_t stride) {
    for (int row = 0; row < 16; ++row) std::memcpy(configured().tile[tile][row], from + row * stride, 64);
  }
  template <int tile>
  static void stream(const float* from, int64_t stride) {
    load<tile>(from, stride);
  }
  template <int tile>
  static void store(float* to, int64_t stride) {
    for (int row = 0; row < 16; ++row) std::memcpy(to + row * stride, configured().tile[tile][row], 64);
  }
  /// Sums of even and of odd elements with a rounding (to nearest even) per product, then of both, then with
  /// the old sum. Subnormal operands count as zero, and subnormal results become zero.
  template <int sum, int a, int b>
  static void multiply_add() {
    State& s = configured();
    for (int m = 0; m < 16; ++m) {
      float even[16] = {}, odd[16] = {};
      for (int k = 0; k < 16; ++k) {
        const uint32_t x = s.tile[a][m][k];
        const float x_even = low(x), x_odd = high(x);
        for (int n = 0; n < 16; ++n) {
          const uint32_t y = s.tile[b][k][n];
          even[n] = flush(std::fma(x_even, low(y), even[n]));
          odd[n] = flush(std::fma(x_odd, high(y), odd[n]));
        }
      }
      for (int n = 0; n < 16; ++n) {
        const float old = flush(std::bit_cast<float>(s.tile[sum][m][n]));
        s.tile[sum][m][n] = std::bit_cast<uint32_t>(flush(old + flush(even[n] + odd[n])));
      }
    }
  }

 private:
  using Tile = uint32_t[16][16];  ///< floats, or pairs of bf16
  struct State {
    bool configured = false;
    Tile tile[8] = {};
  };
  static State& state() {
    static thread_local State state;
    return state;
  }
  static State& configured() {
    NRL_CHECK(state().configured, "the tiles of this thread are not configured");
    return state();
  }
  static float flush(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x; }
  static float low(uint32_t pair) { return flush(std::bit_cast<float>(pair << 16)); }
  static float high(uint32_t pair) { return flush(std::bit_cast<float>(pair & 0xffff0000)); }
};

}  // namespace nrl::ops::NRL_ISA
