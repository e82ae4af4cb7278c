#include <array>

#include "apps/bench/bench.h"
#include "core/base/log.h"
#include "parallel/comm/world/bench.h"

namespace nrl::bench {

int comm(nrl::comm::World& world, const Args& args) {
  if (args.device == "cuda" || !args.json.empty())
    fail(Exit::usage, "bench comm measures host memory only and supports neither --device cuda nor --json");
  if (world.size() == 1) log::info("only one rank: run under mpirun to measure communication");
  const std::array<int64_t, 6> sizes{1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 23, 1 << 26};
  log::line(nrl::comm::format_timings(nrl::comm::comm_benchmark(world.comm(), sizes)));
  return 0;
}

}  // namespace nrl::bench
