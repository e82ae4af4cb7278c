// Costs of a range, in nanoseconds; hidden: prints figures (trace_tests "[cost]").

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "core/trace/trace.h"
#include "tests/catch.h"

namespace {

using namespace nrl;

/// The shortest mean time of a range over rounds, in nanoseconds.
double range_ns(int ranges) {
  double best = 1e9;
  for (int round = 0; round < 9; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < ranges; ++i) {
      const trace::Range range("range");
      asm volatile("" ::: "memory");
    }
    const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - begin;
    best = std::min(best, taken.count() / ranges);
  }
  return best;
}

TEST_CASE("the cost of a range", "[.cost]") {
  trace::start(trace::Mode::off);
  const double off = range_ns(20'000);
  trace::start(trace::Mode::totals);
  const double totals = range_ns(20'000);
  trace::start(trace::Mode::timeline);
  const double timeline = range_ns(20'000);
  trace::start(trace::Mode::off);
  std::printf("a range takes %.2f ns disabled, %.1f ns in totals, %.1f ns in a timeline\n", off, totals,
              timeline);
  CHECK(off < totals);
}

}  // namespace
