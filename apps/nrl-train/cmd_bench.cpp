// nrl-train bench: what this machine does, beside its limits.

#include "apps/nrl-train/cmd_bench.h"

#include <array>

#include "core/base/log.h"
#include "parallel/comm/bench.h"
#include "parallel/comm/world.h"

namespace nrl::app {
namespace {

int bench_comm(const BenchArgs& args) {
  if (args.device == "cuda" || !args.json.empty())
    fail(Exit::usage, "bench comm measures host memory and takes neither --device cuda nor --json");
  const auto world = comm::World::init();
  log::init(world->rank(), world->size());
  if (world->size() == 1) log::info("one rank: start it under mpirun to measure communication");
  const std::array<int64_t, 7> sizes{1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26};
  const auto timings = comm::comm_benchmark(world->comm(), sizes);
  log::line(comm::format_timings(timings));
  world->finalize();
  return 0;
}

}  // namespace

int run_bench(const BenchArgs& args) {
  if (args.what != "step" && (!args.config.path.empty() || !args.config.overrides.empty()))
    fail(Exit::usage, "bench {} takes no configuration", args.what);
  if (args.what == "ops") return bench::ops(args);
  if (args.what == "gemm") return bench::gemm(args);
  if (args.what == "attention") return bench::attention(args);
  if (args.what == "step") return bench::step(args);
  return bench_comm(args);
}

}  // namespace nrl::app
