#include "parallel/comm/world/bench.h"

#include <cstdio>

#include "tests/catch.h"
#include "tests/comm/world_fixture.h"

using namespace nrl::comm;

TEST_CASE("the benchmark gives a line for every operation and size", "[bench]") {
  auto& world = test_world().comm();
  const std::vector<int64_t> sizes = {64, 100000};
  const auto timings = comm_benchmark(world, sizes, 0.005);
  const size_t lines = world.size() > 1 ? 8 : 7;
  REQUIRE(timings.size() == 2 * lines);
  for (const CommTiming& t : timings) {
    REQUIRE(t.seconds > 0);
    REQUIRE(t.bytes % (4 * world.size()) == 0);
    const bool compared = world.size() > 1 && t.op != "all_to_all" && t.op != "send+recv";
    REQUIRE((t.speedup > 0) == compared);
  }
  REQUIRE(format_timings(timings).find("all_reduce") != std::string::npos);
}

TEST_CASE("measure", "[.measure]") {  // on request: comm_tests "[.measure]"
  auto& world = test_world().comm();
  const std::vector<int64_t> sizes = {8,       1 << 10, 16 << 10, 64 << 10, 256 << 10,
                                      1 << 20, 4 << 20, 16 << 20, 64 << 20};
  const auto timings = comm_benchmark(world, sizes);
  if (world.rank() == 0) std::fputs(format_timings(timings).c_str(), stdout);
}
