#pragma once
// The tile registers of AMX, eight of 16 rows of 64 bytes. The compiler knows none of them; "memory" keeps it
// from moving a load before what was stored in C++.

#include <cstdint>

namespace nrl::ops::NRL_ISA {

struct Tiles {
  /// Before a thread's first operation. The instruction also sets all tiles to zero.
  static void configure() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } const layout;
    static_assert(sizeof layout == 64);
    asm volatile("ldtilecfg %0" : : "m"(layout));
  }
  /// After the last one: without it each switch of the thread saves 8 KiB of registers, and an idle core
  /// keeps them powered.
  static void release() { asm volatile("tilerelease"); }

  template <int tile>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(tile));
  }
  /// Rows `stride` floats apart.
  template <int tile>
  static void load(const float* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride * 4), "i"(tile) : "memory");
  }
  /// The same, of memory that the first-level cache need not keep.
  template <int tile>
  static void stream(const float* from, int64_t stride) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride * 4), "i"(tile) : "memory");
  }
  template <int tile>
  static void store(float* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride * 4), "i"(tile) : "memory");
  }
  /// sum[m][n] += for all k: a[m][k][0] b[k][n][0] + a[m][k][1] b[k][n][1], with pairs of bf16.
  template <int sum, int a, int b>
  static void multiply_add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sum), "i"(a), "i"(b));
  }
};

}  // namespace nrl::ops::NRL_ISA
