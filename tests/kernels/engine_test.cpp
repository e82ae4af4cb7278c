// The fiber engine does what CUDA's documents say, in every order of blocks, warps and lanes.

#include <array>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

#include "tests/kernels/orders.h"

namespace {

using namespace nrl;
using namespace nrl::kernel_test;
using kernel::all_lanes;

// --- indices -------------------------------------------------------------------------------------

__global__ void indices(unsigned* out) {
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] += block * 1000 + thread;
}

TEST_CASE("every thread of a three-dimensional grid runs once", "[kernels]") {
  in_every_order([] {
    const dim3 grid(3, 2, 4), block(5, 3, 7);
    std::vector<unsigned> out(24 * 105, 0);
    NRL_LAUNCH((indices), grid, block, 0, nullptr, out.data());
    for (unsigned b = 0; b < 24; ++b) {
      for (unsigned t = 0; t < 105; ++t) REQUIRE(out[b * 105 + t] == b * 1000 + t);
    }
  });
}

__global__ void sequence(int* order, int* count) {
  order[atomicAdd(count, 1)] = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
}

TEST_CASE("orders are what they are called", "[kernels]") {
  const sim::Options before = sim::options();
  auto run = [](const sim::Options& options) {
    sim::set_options(options);
    std::vector<int> order(3 * 64);
    int count = 0;
    NRL_LAUNCH((sequence), 3, 64, 0, nullptr, order.data(), &count);
    REQUIRE(count == 3 * 64);
    return order;
  };
  std::vector<int> ascending(3 * 64);
  std::iota(ascending.begin(), ascending.end(), 0);
  const std::vector<int> descending(ascending.rbegin(), ascending.rend());
  const std::vector<int> first = run({sim::Order::random, 1, 1}), second = run({sim::Order::random, 2, 1});
  CHECK(run({sim::Order::forward, 1, 1}) == ascending);
  CHECK(run({sim::Order::reverse, 1, 1}) == descending);
  CHECK(first != ascending);
  CHECK(first != second);
  CHECK(run({sim::Order::random, 1, 1}) == first);
  CHECK(std::set<int>(first.begin(), first.end()).size() == first.size());
  sim::set_options(before);
}

// --- barriers ------------------------------------------------------------------------------------

__global__ void ladder(int* out, int steps) {
  NRL_DYN_SHARED(int, values);
  const int t = static_cast<int>(threadIdx.x), n = static_cast<int>(blockDim.x);
  values[t] = t;
  __syncthreads();
  for (int i = 0; i < steps; ++i) {
    const int next = values[(t + 1) % n];
    __syncthreads();
    values[t] = next;
    __syncthreads();
  }
  out[static_cast<int>(blockIdx.x) * n + t] = values[t];
}

TEST_CASE("barriers order shared memory", "[kernels]") {
  in_every_order([] {
    for (int n : {1, 31, 32, 100, 1024}) {
      std::vector<int> out(static_cast<size_t>(2 * n));
      NRL_LAUNCH((ladder), 2, static_cast<unsigned>(n), static_cast<size_t>(n) * sizeof(int), nullptr,
                 out.data(), 5);
      for (int i = 0; i < 2 * n; ++i) REQUIRE(out[i] == (i % n + 5) % n);
    }
  });
}

__global__ void votes_of_block(int* out) {
  const bool third = threadIdx.x % 3 == 0;
  const int count = __syncthreads_count(third);
  const int any = __syncthreads_or(threadIdx.x == 70), none = __syncthreads_or(0);
  const int all = __syncthreads_and(1), not_all = __syncthreads_and(third);
  if (count == 34 && any && !none && all && !not_all) atomicAdd(out, 1);
}

__global__ void early_exit(int* out) {
  if (threadIdx.x % 2 == 1) return;
  NRL_SHARED(int, s, [128]);
  s[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = s[(threadIdx.x + 2) % 128];
}

TEST_CASE("barriers vote, and threads that have returned are not waited for", "[kernels]") {
  in_every_order([] {
    int voted = 0;
    NRL_LAUNCH((votes_of_block), 1, 100, 0, nullptr, &voted);
    CHECK(voted == 100);
    std::vector<int> out(128, 0);
    NRL_LAUNCH((early_exit), 1, 128, 0, nullptr, out.data());
    CHECK(std::accumulate(out.begin(), out.end(), 0) == 64);
  });
}

// --- warps ---------------------------------------------------------------------------------------

struct Shuffled {
  int direct[32], up[32], down[32], bits[32];
};

__global__ void shuffles(Shuffled* out, int width, int amount) {
  const int lane = static_cast<int>(threadIdx.x);
  out->direct[lane] = __shfl_sync(all_lanes, lane, amount, width);
  out->up[lane] = __shfl_up_sync(all_lanes, lane, static_cast<unsigned>(amount), width);
  out->down[lane] = __shfl_down_sync(all_lanes, lane, static_cast<unsigned>(amount), width);
  out->bits[lane] = __shfl_xor_sync(all_lanes, lane, amount, width);
}

TEST_CASE("shuffles stay in their segment", "[kernels]") {
  in_every_order([] {
    for (int width : {1, 2, 8, 16, 32}) {
      for (int amount : {0, 1, 3, 8, 17, 31}) {
        Shuffled out{};
        NRL_LAUNCH((shuffles), 1, 32, 0, nullptr, &out, width, amount);
        for (int lane = 0; lane < 32; ++lane) {
          // The CUDA C++ programming guide, "Warp Shuffle Functions".
          const int first = lane / width * width, last = first + width - 1;
          const auto i = static_cast<size_t>(lane);
          REQUIRE(out.direct[i] == first + amount % width);
          REQUIRE(out.up[i] == (lane - amount >= first ? lane - amount : lane));
          REQUIRE(out.down[i] == (lane + amount <= last ? lane + amount : lane));
          REQUIRE(out.bits[i] == ((lane ^ amount) <= last ? lane ^ amount : lane));
        }
      }
    }
  });
}

__global__ void types(double* d, long long* l, unsigned* u) {
  const int lane = static_cast<int>(threadIdx.x);
  d[lane] = __shfl_xor_sync(all_lanes, lane + 0.25, 1);
  l[lane] = __shfl_xor_sync(all_lanes, (1ll << 40) + lane, 1);
  u[lane] = __shfl_xor_sync(all_lanes, 0xfffffff0u + static_cast<unsigned>(lane % 2), 1);
}

__global__ void ballots(unsigned* out, unsigned threads) {
  // Two halves of a warp vote on their own; the last warp is not full.
  const unsigned lane = threadIdx.x % 32, half = lane < 16 ? 0xffffu : 0xffff0000u;
  const unsigned here = threads - threadIdx.x / 32 * 32;
  const unsigned present = here >= 32 ? all_lanes : (1u << here) - 1;
  const unsigned votes = __ballot_sync(half & present, lane % 4 == 0);
  const bool good = votes == (0x11111111u & half & present) &&
                    __any_sync(half & present, lane == 1 || lane == 17) &&
                    !__all_sync(half & present, lane % 2) && __all_sync(half & present, 1);
  __syncwarp();
  out[threadIdx.x] = good ? 1 : votes + 2;
}

TEST_CASE("votes of parts of a warp, and shuffles of every type", "[kernels]") {
  in_every_order([] {
    std::vector<double> d(32);
    std::vector<long long> l(32);
    std::vector<unsigned> u(32), votes(57);
    NRL_LAUNCH((types), 1, 32, 0, nullptr, d.data(), l.data(), u.data());
    CHECK(d[6] == 7.25);
    CHECK(l[6] == (1ll << 40) + 7);
    CHECK(u[6] == 0xfffffff1u);
    NRL_LAUNCH((ballots), 1, 57, 0, nullptr, votes.data(), 57u);
    for (unsigned v : votes) CHECK(v == 1);
  });
}

// --- reductions of kernel.h ----------------------------------------------------------------------

__global__ void reductions(const float* x, float* sums, float* maxima) {
  const float v = x[blockIdx.x * blockDim.x + threadIdx.x];
  const float sum = kernel::block_sum(v), most = kernel::block_max(v), again = kernel::block_sum(sum);
  sums[blockIdx.x * blockDim.x + threadIdx.x] = again;
  maxima[blockIdx.x * blockDim.x + threadIdx.x] = most;
}

TEST_CASE("block_sum and block_max give every thread the same", "[kernels]") {
  in_every_order([] {
    for (unsigned n : {32u, 96u, 1024u}) {
      std::vector<float> x(2 * n), sums(2 * n), maxima(2 * n);
      for (unsigned i = 0; i < 2 * n; ++i) x[i] = -static_cast<float>(i * 7 % 13) - (i < n ? 0.0f : 1.0f);
      NRL_LAUNCH((reductions), 2, n, 0, nullptr, x.data(), sums.data(), maxima.data());
      for (unsigned b = 0; b < 2; ++b) {
        const float sum = std::accumulate(x.begin() + b * n, x.begin() + (b + 1) * n, 0.0f);
        for (unsigned i = 0; i < n; ++i) {
          REQUIRE(sums[b * n + i] == sum * static_cast<float>(n));
          REQUIRE(maxima[b * n + i] == (b == 0 ? 0.0f : -1.0f));
        }
      }
    }
  });
}

// --- atomics -------------------------------------------------------------------------------------

struct Counters {
  float sum = 0;
  int most = -1, least = 1 << 30, minus = 0;
  unsigned bits = 0, kept = 0xffffffffu;
  int owner = -1, tries = 0;
  unsigned long long large = 0;
};

__global__ void atomics(Counters* c) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  atomicAdd(&c->sum, 0.5f);
  atomicMax(&c->most, i);
  atomicMin(&c->least, i);
  atomicSub(&c->minus, 2);
  atomicOr(&c->bits, 1u << (i % 32));
  atomicAnd(&c->kept, ~(1u << (i % 16)));
  atomicAdd(&c->large, 1ull << 32);
  if (atomicCAS(&c->owner, -1, i) == -1) atomicAdd(&c->tries, 1);
}

TEST_CASE("atomic operations lose nothing", "[kernels]") {
  in_every_order([] {
    Counters c;
    NRL_LAUNCH((atomics), 20, 64, 0, nullptr, &c);
    CHECK(c.sum == 640.0f);
    CHECK(c.most == 1279);
    CHECK(c.least == 0);
    CHECK(c.minus == -2560);
    CHECK(c.bits == 0xffffffffu);
    CHECK(c.kept == 0xffff0000u);
    CHECK(c.large == 1280ull << 32);
    CHECK(c.tries == 1);
  });
}

__global__ void half_a_warp(float* out) {
  float d[1][4] = {};
  const unsigned a[4] = {}, b[1][2] = {};
  if (threadIdx.x < 16) return;
  nrl_mma_m16n8k16<bf16, 1>(d, a, b);
  out[threadIdx.x] = d[0][0];
}

// --- errors --------------------------------------------------------------------------------------

__global__ void traps(int* out, unsigned block) {
  if (blockIdx.x == block && threadIdx.x == 3) __trap();
  if (threadIdx.x == 0) out[blockIdx.x] = 1;
}

__global__ void throws(int* out) {
  *out = 1;
  throw std::runtime_error("not CUDA");
}

__global__ void launches(int* out) {
  NRL_LAUNCH((traps), 1, 1, 0, nullptr, out, 1u);
}

TEST_CASE("errors name the kernel and the place, and the engine goes on", "[kernels]") {
  in_every_order([] {
    std::vector<int> out(32, 0);
    std::vector<float> result(32, 0);
    const std::string text = error_of([&] { NRL_LAUNCH((traps), 8, 32, 0, nullptr, out.data(), 5u); });
    CHECK(text.find("kernel traps, block (5, 0, 0), thread (3, 0, 0), ") == 0);
    CHECK(text.find("engine_test.cpp:") != text.npos);
    CHECK(error_of([&] {
            NRL_LAUNCH((half_a_warp), 1, 32, 0, nullptr, result.data());
          }).find("a whole warp") != std::string::npos);
    CHECK(error_of([&] { NRL_LAUNCH((throws), 1, 1, 0, nullptr, out.data()); }).find("not CUDA") !=
          std::string::npos);
    CHECK(error_of([&] {
            NRL_LAUNCH((launches), 1, 1, 0, nullptr, out.data());
          }).find("launched by a kernel") != std::string::npos);
    CHECK(error_of([&] { NRL_LAUNCH((traps), 8, 32, 0, nullptr, out.data(), 9u); }) == "no error");
    CHECK(std::accumulate(out.begin(), out.begin() + 8, 0) == 8);
  });
}

TEST_CASE("device functions refuse to run outside a kernel", "[kernels]") {
  CHECK(error_of([] { __syncthreads(); }).find("outside a kernel") != std::string::npos);
}

// --- several launching threads -------------------------------------------------------------------

TEST_CASE("several OS threads launch at the same time", "[kernels]") {
  std::array<int, 4> good{};
  std::vector<std::thread> threads;
  for (size_t t = 0; t < good.size(); ++t) {
    threads.emplace_back([&good, t] {
      const unsigned n = 32u * static_cast<unsigned>(t + 1);
      for (int i = 0; i < 20; ++i) {
        std::vector<int> out(2 * n);
        NRL_LAUNCH((ladder), 2, n, n * sizeof(int), nullptr, out.data(), 3);
        bool same = true;
        for (unsigned k = 0; k < 2 * n; ++k) same = same && out[k] == static_cast<int>((k % n + 3) % n);
        good[t] += same;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int count : good) CHECK(count == 20);
}

}  // namespace
