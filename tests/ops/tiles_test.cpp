// The C++ version of AMX tiles, which stands for the processor in tests, and the choice of kernels by rates.
#include <cmath>
#include <functional>
#include <thread>

#include "tests/catch.h"

#define NRL_ISA test_isa
#include "core/ops/cpu_choice.h"
#include "core/ops/gemm/tiles_emulated.h"

using namespace nrl;
using namespace nrl::ops;

namespace {

using T = test_isa::EmulatedTiles;

struct Tile {
  float value[16][16] = {};
};

/// A pair of bf16 (exact in it).
float pair(float even, float odd) {
  return std::bit_cast<float>(std::bit_cast<uint32_t>(even) >> 16 | std::bit_cast<uint32_t>(odd));
}

/// old + a b, of one row of a and one column of b.
float dot(std::vector<std::pair<float, float>> even_products,
          std::vector<std::pair<float, float>> odd_products, float old = 0) {
  Tile a, b, c;
  for (size_t k = 0; k < 16; ++k) {
    const auto at = [k](const auto& list) { return k < list.size() ? list[k] : std::pair{0.0f, 0.0f}; };
    const auto even = at(even_products), odd = at(odd_products);
    a.value[3][k] = pair(even.first, odd.first);
    b.value[k][5] = pair(even.second, odd.second);
  }
  c.value[3][5] = old;
  T::configure();
  T::load<4>(a.value[0], 16);
  T::load<6>(b.value[0], 16);
  T::load<0>(c.value[0], 16);
  T::multiply_add<0, 4, 6>();
  T::store<0>(c.value[0], 16);
  T::release();
  return c.value[3][5];
}

}  // namespace

TEST_CASE("emulated tiles multiply pairs of a row and a column") {
  Tile a, b, c;
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) {
      a.value[i][j] = pair(static_cast<float>(i + 1), static_cast<float>(j - 3));
      b.value[i][j] = pair(static_cast<float>(i - j), static_cast<float>(2 * j));
    }
  T::configure();
  T::load<5>(a.value[0], 16);
  T::load<7>(b.value[0], 16);
  T::zero<2>();
  T::multiply_add<2, 5, 7>();
  T::store<2>(c.value[0], 16);
  T::release();
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 16; ++n) {
      int wanted = 0;
      for (int k = 0; k < 16; ++k) wanted += (m + 1) * (k - n) + (k - 3) * 2 * n;
      CAPTURE(m, n);
      CHECK(c.value[m][n] == static_cast<float>(wanted));
    }
}

TEST_CASE("emulated tiles round and flush as the manual says") {
  constexpr float big = 0x1p24f, tiny = 0x1p-130f;  // big + 1 rounds to big, to even
  CHECK(dot({{big, 1}, {1, 1}}, {}) == big);
  CHECK(dot({{big, 1}, {3, 1}}, {}) == big + 4);
  CHECK(dot({{big, 1}}, {{1, 1}, {1, 1}}) == big + 2);  // even and odd elements have sums of their own
  CHECK(dot({{1, 1}}, {{1, 1}}, big) == big + 2);       // which are added before the old sum
  CHECK(dot({{0x1p100f, 0x1p100f}, {-0x1p100f, 0x1p100f}}, {}) == INFINITY);
  CHECK(dot({{tiny, 0x1p100f}}, {}) == 0);      // a subnormal operand
  CHECK(dot({}, {{0x1p-70f, 0x1p-60f}}) == 0);  // a subnormal result
  CHECK(dot({{0x1p-126f, 1}}, {}) == 0x1p-126f);
  CHECK(dot({}, {}, tiny) == 0);
  CHECK(std::isnan(dot({{NAN, 0}}, {})));
  CHECK(dot({{INFINITY, 1}}, {{1, 1}}) == INFINITY);
}

TEST_CASE("emulated tiles belong to a thread that has configured them") {
  const auto fails = [](const std::function<void()>& f) {
    bool failed = false;
    std::thread([&] {
      try {
        f();
      } catch (const Error&) {
        failed = true;
      }
    }).join();
    return failed;
  };
  T::configure();
  CHECK(fails([] { T::zero<0>(); }));
  CHECK(fails([] { T::release(); }));
  CHECK(fails([] {
    T::configure();
    T::configure();
  }));
  CHECK_FALSE(fails([] {
    T::configure();
    T::release();
    T::configure();
  }));
  T::release();
}

TEST_CASE("the fastest kernels of bf16 are chosen") {
  using enum cpu::Isa;
  CHECK(fastest_isa(avx512_amx, 1, 16) == avx512_amx);
  CHECK(fastest_isa(avx512_amx, 2, 1.5) == avx512_bf16);
  CHECK(fastest_isa(avx512_amx, 1, 1) == avx512);
  CHECK(fastest_isa(avx512_bf16, 2, 0) == avx512_bf16);
  CHECK(fastest_isa(avx512_bf16, 1, 0) == avx512);
  CHECK(fastest_isa(avx2, 0, 0) == avx2);
  CpuChoice choice{.isa = avx512_amx, .usable = avx512_amx, .bf16_rate = 1, .amx_rate = 16};
  CHECK(bf16_reason(choice) ==
        "bf16 dot products run at 1.0 times the rate of fp32 FMAs, AMX at 16.0 times (measured)");
  choice = {.isa = avx512, .usable = avx512_bf16, .bf16_rate = 0.5, .amx_problem = "it is off"};
  CHECK(bf16_reason(choice) ==
        "bf16 dot products run at 0.5 times the rate of fp32 FMAs (measured); AMX is not used: it is off");
}
