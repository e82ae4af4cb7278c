// kernel.h's wrappers of PTX on the fiber engine: matrices, asynchronous copies, signals between blocks.

#include <array>
#include <cmath>
#include <numeric>
#include <vector>

#include "core/base/philox.h"
#include "core/ops/shared/fp8.h"
#include "tests/kernels/orders.h"

namespace {

using namespace nrl;
using namespace nrl::kernel_test;

// --- matrix tile and asynchronous copies ---------------------------------------------------------

/// Of 16 rows of A and 16 columns of B, both of 32 bytes.
template <class A, class B>
__global__ void tile_product(const A* a, const B* b, float* d) {
  // Through shared memory, as a GEMM would.
  NRL_SHARED(uint4, sa, [32]);
  NRL_SHARED(uint4, sb, [32]);
  const int lane = static_cast<int>(threadIdx.x), group = lane / 4, pair = lane % 4;
  nrl_cp_async16(&sa[lane], a + lane * 16 / sizeof(A));
  nrl_cp_async_commit();
  nrl_cp_async16(&sb[lane], b + lane * 16 / sizeof(B));
  nrl_cp_async_commit();
  nrl_cp_async_wait<1>();
  nrl_cp_async_wait<0>();
  __syncthreads();
  const unsigned* wa = reinterpret_cast<const unsigned*>(sa);  // 8 words a row
  const unsigned* wb = reinterpret_cast<const unsigned*>(sb);
  const unsigned fa[4] = {wa[group * 8 + pair], wa[(group + 8) * 8 + pair], wa[group * 8 + pair + 4],
                          wa[(group + 8) * 8 + pair + 4]};
  unsigned fb[2][2];
  for (int n = 0; n < 2; ++n)
    for (int half = 0; half < 2; ++half) fb[n][half] = wb[(n * 8 + group) * 8 + pair + half * 4];
  float c[2][4] = {{1, 1, 1, 1}, {1, 1, 1, 1}};
  if constexpr (sizeof(A) == 2)
    nrl_mma_m16n8k16<A, 2>(c, fa, fb);
  else
    nrl_mma_m16n8k32<A, B, 2>(c, fa, fb);
  for (int n = 0; n < 2; ++n)
    for (int i = 0; i < 4; ++i) d[(group + i / 2 * 8) * 16 + n * 8 + pair * 2 + i % 2] = c[n][i];
}

/// `random`: from -0.5 to 0.5.
template <class T>
T rounded(float random) {
  if constexpr (sizeof(T) == 2)
    return T(random);
  else
    return {static_cast<uint8_t>(ops::fp8::encode<T::format>(random))};
}

template <class A, class B>
void check_tile_product() {
  constexpr size_t depth = 32 / sizeof(A);
  const PhiloxStream random(7, "tile");
  std::array<A, 16 * depth> a;
  std::array<B, 16 * depth> b;
  for (size_t i = 0; i < a.size(); ++i) a[i] = rounded<A>(random.uniform(i) - 0.5f);
  for (size_t i = 0; i < b.size(); ++i) b[i] = rounded<B>(random.uniform(1000 + i) - 0.5f);
  in_every_order([&] {
    std::array<float, 256> d{};
    NRL_LAUNCH((tile_product<A, B>), 1, 32, 0, nullptr, a.data(), b.data(), d.data());
    for (size_t m = 0; m < 16; ++m) {
      for (size_t n = 0; n < 16; ++n) {
        double want = 1;
        for (size_t k = 0; k < depth; ++k)
          want += static_cast<double>(float(a[m * depth + k])) * float(b[n * depth + k]);
        REQUIRE(d[m * 16 + n] == Approx(want).epsilon(1e-6));
      }
    }
  });
}

TEST_CASE("tiles of mma.sync after cp.async equal the product in double precision", "[kernels]") {
  using E4m3 = ops::fp8::Number<DType::e4m3>;
  using E5m2 = ops::fp8::Number<DType::e5m2>;
  check_tile_product<bf16, bf16>();
  check_tile_product<f16, f16>();
  check_tile_product<E4m3, E4m3>();
  check_tile_product<E4m3, E5m2>();
  check_tile_product<E5m2, E4m3>();
  check_tile_product<E5m2, E5m2>();
}

/// f: (2, 4, 32), plain and transposed. Row r of matrix i is at (8 i + r) * 11 % 32 of shared memory.
__global__ void matrix_loads(const uint16_t* in, unsigned* f) {
  NRL_SHARED(uint4, s, [32]);
  const unsigned lane = threadIdx.x;
  nrl_cp_async16(&s[lane], in + lane * 8);
  nrl_cp_async_commit();
  nrl_cp_async_wait<0>();
  __syncthreads();
  unsigned plain[4], transposed[4];
  nrl_ldmatrix_x4<false>(plain, s, static_cast<int>(lane * 11 % 32 * 16));
  nrl_ldmatrix_x4<true>(transposed, s, static_cast<int>(lane * 11 % 32 * 16));
  for (unsigned i = 0; i < 4; ++i) {
    f[i * 32 + lane] = plain[i];
    f[(4 + i) * 32 + lane] = transposed[i];
  }
}

TEST_CASE("ldmatrix gives the fragments of the PTX manual", "[kernels]") {
  std::array<uint16_t, 256> in;
  std::iota(in.begin(), in.end(), uint16_t{1000});
  in_every_order([&] {
    std::array<unsigned, 256> f{};
    NRL_LAUNCH((matrix_loads), 1, 32, 0, nullptr, in.data(), f.data());
    for (unsigned lane = 0; lane < 32; ++lane) {
      for (unsigned i = 0; i < 4; ++i) {
        const auto element = [&](unsigned row, unsigned column) {
          return unsigned{in[(8 * i + row) * 11 % 32 * 8 + column]};
        };
        const unsigned row = lane / 4, column = lane % 4 * 2;
        REQUIRE(f[i * 32 + lane] == (element(row, column) | element(row, column + 1) << 16));
        REQUIRE(f[(4 + i) * 32 + lane] == (element(column, row) | element(column + 1, row) << 16));
      }
    }
  });
}

__global__ void copies(const float4* in, float4* out, bool* early) {
  NRL_SHARED(float4, s, [32]);
  const unsigned lane = threadIdx.x;
  s[lane] = make_float4(1, 1, 1, 1);
  nrl_cp_async16(&s[lane], in + lane, lane % 3 != 0);
  nrl_cp_async_commit();
  early[lane] = !std::isnan(s[lane].x);  // neither the old nor the new value
  nrl_cp_async_wait<0>();
  out[lane] = s[lane];
}

TEST_CASE("cp.async leaves NaN until it is waited for, and zeros for what is not real", "[kernels]") {
  std::vector<float4> in(31, make_float4(1, 2, 3, 4)), out(31);
  for (size_t i = 0; i < 31; i += 3) in[i].x = NAN;
  std::array<bool, 32> early{};
  in_every_order([&] {
    NRL_LAUNCH((copies), 1, 31, 0, nullptr, in.data(), out.data(), early.data());
    for (unsigned i = 0; i < 31; ++i) {
      REQUIRE(!early[i]);
      REQUIRE(out[i].x == (i % 3 ? 1.0f : 0.0f));
      REQUIRE(out[i].w == (i % 3 ? 4.0f : 0.0f));
    }
  });
}

__global__ void powers(const float* x, float* y) {
  y[threadIdx.x] = nrl_exp2(x[threadIdx.x]);
}

TEST_CASE("base-2 exponentials have their limits", "[kernels]") {
  const std::vector<float> x = {0, 1, -1, 10, -INFINITY, INFINITY, NAN, 0.5f};
  std::vector<float> y(x.size());
  NRL_LAUNCH((powers), 1, 8, 0, nullptr, x.data(), y.data());
  CHECK(std::vector<float>(y.begin(), y.begin() + 6) == std::vector<float>{1, 2, 0.5f, 1024, 0, INFINITY});
  CHECK(std::isnan(y[6]));
  CHECK(y[7] == Approx(std::sqrt(2.0)).epsilon(3e-7));
}

TEST_CASE("bytes and halves of words are picked as CUDA defines it", "[kernels]") {
  const unsigned x = 0x33221100u, y = 0x77665544u;
  for (unsigned selector = 0; selector < 0x8000; selector += 0x0123) {
    unsigned want = 0;
    for (unsigned i = 0; i < 4; ++i) want |= ((selector >> 4 * i) % 8 * 0x11u) << 8 * i;
    CHECK(__byte_perm(x, y, selector) == want);
  }
  CHECK(__byte_perm(0x80ff0001u, 0x12345678u, 0x4370) == 0x78801201u);
  CHECK(__vmaxu2(0x0001ffffu, 0x00020000u) == 0x0002ffffu);
  CHECK(__vmaxu2(0x7f800000u, 0x7f7fffffu) == 0x7f80ffffu);
}

// --- blocks that wait for others -----------------------------------------------------------------

/// Block n of `order` appends its number to a list, after block n - 1.
__global__ void take_turns(unsigned* tickets, unsigned* turn, unsigned* list, bool by_ticket) {
  NRL_SHARED(unsigned, number, [1]);
  if (threadIdx.x == 0) number[0] = by_ticket ? atomicAdd(tickets, 1u) : blockIdx.x;
  __syncthreads();
  if (threadIdx.x % 32 == 0) nrl_wait_for_signal(turn, number[0], "the turn before");
  __syncwarp();
  list[number[0] * blockDim.x + threadIdx.x] = turn[1] + threadIdx.x;
  __syncthreads();
  if (threadIdx.x != 0) return;
  turn[1] += blockDim.x;
  nrl_signal(turn, number[0] + 1);
}

TEST_CASE("blocks take turns in the order of their tickets", "[kernels]") {
  in_every_order([] {
    unsigned tickets = 0;
    std::vector<unsigned> turn(2), list(9 * 64);
    NRL_LAUNCH((take_turns), 9, 64, 0, nullptr, &tickets, turn.data(), list.data(), true);
    for (unsigned i = 0; i < list.size(); ++i) REQUIRE(list[i] == i);
  });
}

/// A row that starts at `offset` bytes of shared memory, or of `out`.
__global__ void loads_a_matrix(unsigned* out, int offset, bool shared) {
  NRL_SHARED(uint4, s, [32]);
  s[threadIdx.x] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  nrl_ldmatrix_x4<false>(out + threadIdx.x * 4, shared ? static_cast<void*>(s) : out, offset);
}

// --- errors --------------------------------------------------------------------------------------

TEST_CASE("ldmatrix wants rows that start at 16 bytes of shared memory, and a whole warp", "[kernels]") {
  alignas(16) std::array<unsigned, 128> out{};
  const auto load = [&](unsigned threads, int offset, bool shared) {
    return error_of(
        [&] { NRL_LAUNCH((loads_a_matrix), 1, threads, 0, nullptr, out.data(), offset, shared); });
  };
  CHECK(load(32, 16, true) == "no error");
  CHECK(load(32, 8, true).find("not aligned") != std::string::npos);
  CHECK(load(32, 0, false).find("ldmatrix of memory that is not shared") != std::string::npos);
  CHECK(load(16, 0, true).find("ldmatrix with the lanes 0000ffff only") != std::string::npos);
}

TEST_CASE("a wait for a block that runs later is an error", "[kernels]") {
  const sim::Options before = sim::options();
  const auto run = [](int resident, bool by_ticket) {
    sim::set_options({sim::Order::reverse, 1, 1, resident});
    unsigned tickets = 0;
    std::vector<unsigned> turn(2), list(9 * 64);
    return error_of(
        [&] { NRL_LAUNCH((take_turns), 9, 64, 0, nullptr, &tickets, turn.data(), list.data(), by_ticket); });
  };
  for (int resident : {1, 3, 8}) {
    CHECK(run(resident, false).find("waits for the turn before, the signal of a block that has not run") !=
          std::string::npos);
    CHECK(run(resident, true) == "no error");  // nothing is left of the blocks that were given up
  }
  CHECK(run(9, false) == "no error");
  sim::set_options(before);
}

__global__ void one_after_another(int* order, int* count) {
  for (int i = 0; i < 2; ++i) {
    if (threadIdx.x == 0) order[(*count)++] = static_cast<int>(blockIdx.x);
    __syncthreads();
  }
}

TEST_CASE("resident blocks take turns at their barriers", "[kernels]") {
  const sim::Options before = sim::options();
  const auto run = [](const sim::Options& options) {
    sim::set_options(options);
    std::vector<int> order(8);
    int count = 0;
    NRL_LAUNCH((one_after_another), 4, 33, 0, nullptr, order.data(), &count);
    return order;
  };
  const auto first = [&run](int resident) {
    std::vector<int> order = run({sim::Order::forward, 1, 1, resident});
    order.resize(4);
    return order;
  };
  CHECK(first(1) == std::vector<int>{0, 0, 1, 1});
  CHECK(first(2) == std::vector<int>{0, 1, 0, 1});
  CHECK(first(4) == std::vector<int>{0, 1, 2, 3});
  const std::vector<int> random = run({sim::Order::random, 1, 1, 4});
  CHECK(run({sim::Order::random, 1, 1, 4}) == random);
  CHECK(run({sim::Order::random, 2, 1, 4}) != random);
  sim::set_options(before);
}

__global__ void waits_forever(unsigned* turn) {
  if (blockIdx.x == 0) nrl_wait_for_signal(turn, 1, "a signal that nobody sends");
}

TEST_CASE("a wait for a signal that no block sends ends with an error", "[kernels]") {
  const sim::Options before = sim::options();
  sim::set_options({.threads = 2, .block_wait_seconds = 0.05});
  unsigned turn = 0;
  const std::string error = error_of([&] { NRL_LAUNCH((waits_forever), 2, 1, 0, nullptr, &turn); });
  sim::set_options(before);
  INFO(error);
  CHECK(error.find("kernel waits_forever, block (0, 0, 0)") != std::string::npos);
  CHECK(error.find("waited 0.05 s for a signal that nobody sends") != std::string::npos);
}

}  // namespace
