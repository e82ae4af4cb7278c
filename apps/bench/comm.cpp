#include <algorithm>

#include "apps/bench/bench.h"
#include "apps/bench/group_rates.h"
#include "apps/bench/links.h"
#include "apps/bench/machine.h"
#include "apps/bench/overlap.h"
#include "apps/train/launch/launch.h"
#include "apps/train/start/placement.h"
#include "apps/train/start/run_config.h"
#include "core/base/log.h"
#include "parallel/comm/world/bench.h"

namespace nrl::bench {
namespace {

using nrl::comm::CommTiming;

// The groups of a configuration; without one all ranks, those of each node, and those with the same place in
// all nodes.
ConfigResult layout_of(nrl::comm::World& world, const Args& args) {
  if (!args.config.empty()) {
    std::vector<std::string> overrides = args.overrides;
    if (args.device != "auto") overrides.push_back("device=" + args.device);
    return train::load_config_collectively(world, args.config, overrides, {.files = false, .memory = false});
  }
  ConfigResult out;
  // Host memory unless asked: opening GPUs would surprise who measures MPI.
  out.config.device = args.device == "cuda" ? DeviceKind::cuda : DeviceKind::cpu;
  std::vector<int> ranks(static_cast<size_t>(world.nodes().back()) + 1);
  for (const int node : world.nodes()) ++ranks[node];
  const bool even = std::all_of(ranks.begin(), ranks.end(), [&](int n) { return n == ranks[0]; });
  if (even) out.config.distributed.tensor_parallel_size = ranks[0];
  return out;
}

// Bus bandwidth of the largest all_reduce.
double rate_of(const std::vector<CommTiming>& timings) {
  double rate = 0;
  for (const CommTiming& t : timings)
    if (t.op == "all_reduce" && t.dtype == DType::f32) rate = t.bus_bytes_per_second;
  return rate;
}

}  // namespace

void for_each_kind(nrl::comm::World& world, const Args& args, const ConfigResult& config,
                   const train::Placement& placement,
                   const std::function<void(const GroupKind&, nrl::comm::Communicator& group,
                                            const std::vector<CommTiming>&)>& use) {
  device::Runtime* const device =
      placement.device() == DeviceType::cuda ? placement.accelerator().runtime.get() : nullptr;
  std::vector<int64_t> sizes{1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 23, 1 << 26};
  if (device) sizes = {1 << 14, 1 << 20, 1 << 24, 1 << 28};
  if (args.quick) sizes = {1 << 10, 1 << 14};
  const parallel::ProcessGrid& grid = placement.grid_position().grid;
  const std::vector<parallel::GroupId> ids = train::groups_of_run(config, placement.grid_position());
  for (const auto& [id, made] : parallel::group_aliases(grid, ids)) {
    if (!(id == made) || !placement.groups().collective(id)) continue;
    nrl::comm::Communicator& group = placement.groups()[id];
    if (group.size() == 1 && world.size() > 1) continue;
    const GroupKind kind(args.config.empty() ? "" : parallel::name_of(id), grid.groups(id), world.nodes());
    world.comm().barrier();
    use(kind, group, nrl::comm::comm_benchmark(group, sizes, args.quick ? 1e-4 : 0.1, device));
  }
}

LinkRates measure_links(nrl::comm::World& world, const Args& args, int rounds) {
  using nrl::comm::Op;
  const ConfigResult config = layout_of(world, args);
  const train::Placement placement(world, config);
  LinkRates out;
  nrl::comm::Communicator* largest = nullptr;
  for_each_kind(
      world, args, config, placement,
      [&](const GroupKind& kind, nrl::comm::Communicator& group, const std::vector<CommTiming>& timings) {
        if (!largest || group.size() > largest->size()) largest = &group;
        for (const CommTiming& t : timings) {
          if (t.dtype != DType::f32) continue;
          for (const Op op : {Op::all_reduce, Op::all_gather, Op::reduce_scatter, Op::all_to_all, Op::send,
                              Op::recv, Op::exchange}) {
            const bool message = op == Op::send || op == Op::recv || op == Op::exchange;
            if (message ? t.op == "send+recv" : t.op == name_of(op))
              out.operations.push_back({.op = op,
                                        .ranks = group.size(),
                                        .domains = kind.nodes(),
                                        .bytes = static_cast<double>(t.bytes),
                                        .seconds = t.seconds});
          }
        }
      });
  world.comm().barrier();
  if (largest) out.overlap = measure_overlap(*largest, placement.exec(), rounds, args.quick);
  return out;
}

int comm(nrl::comm::World& world, const Args& args) {
  const ConfigResult config = layout_of(world, args);
  const train::Placement placement(world, config);
  const machine::DeviceModel* model =
      placement.device() == DeviceType::cuda
          ? machine::model_of_device(placement.accelerator().runtime->properties())
          : nullptr;
  if (world.size() == 1) log::info("only one rank: run under mpirun to measure communication");
  Report report(args, describe_device(placement.exec()));
  report.set("config", args.config);
  report.set("ranks", world.size());
  report.set("nodes", world.nodes().back() + 1);
  for_each_kind(
      world, args, config, placement,
      [&](const GroupKind& kind, nrl::comm::Communicator& group, const std::vector<CommTiming>& timings) {
        std::vector<double> of_ranks(static_cast<size_t>(world.size())), rates;
        of_ranks[world.rank()] = rate_of(timings);
        world.comm().all_reduce(of_ranks);
        for (const std::vector<int>& members : kind.groups) rates.push_back(of_ranks[members.front()]);
        log::line(kind.heading());
        log::line(nrl::comm::format_timings(timings) + kind.remarks(rates, world.hosts(), model));
        for (const CommTiming& t : timings)
          report.add(JsonValue::object(
              {{"group", kind.name()},
               {"groups", kind.groups.size()},
               {"ranks", group.size()},
               {"nodes", kind.nodes()},
               {"op", t.op},
               {"dtype", name_of(t.dtype)},
               {"bytes", t.bytes},
               {"seconds", t.seconds},
               {"bus_bytes_per_second", t.bus_bytes_per_second},
               {"mpi_seconds", t.mpi_seconds > 0 ? JsonValue(t.mpi_seconds) : JsonValue()}}));
      });
  return world.rank() == 0 ? report.finish() : 0;
}

}  // namespace nrl::bench
