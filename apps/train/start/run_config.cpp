#include "apps/train/start/run_config.h"

#include <algorithm>

#include "apps/plan/nodes.h"
#include "apps/train/launch/device_choice.h"
#include "apps/train/launch/launch.h"
#include "apps/train/launch/run_control.h"
#include "apps/train/start/decide.h"
#include "core/base/log.h"
#include "core/base/output.h"
#include "parallel/grid/nodes.h"

namespace nrl::train {

namespace {

// Renumbers the ranks if the grid lies better on another order of nodes of different sizes.
void order_nodes(comm::World& world, const Config& config) {
  const std::vector<ClusterNode> nodes = parallel::nodes_of(world.nodes(), world.hosts());
  const std::vector<int> order = plan::node_order(config, nodes);
  if (std::is_sorted(order.begin(), order.end())) return;
  std::vector<int> ranks;
  for (const int node : order)
    for (int r = 0; r < world.size(); ++r)
      if (world.nodes()[r] == node) ranks.push_back(r);
  world.reorder(ranks);
  log::init(world.rank(), world.size());
}

}  // namespace

void check_run(ConfigResult& result, const RunSetting& setting) {
  const std::optional<model::ModelSpec> spec = check_but_memory(result, setting);
  // The memory of GPUs is not known before they are open.
  if (!result.ok() || !setting.memory || !setting.grid || setting.world == 0 ||
      choose_device(result.config.device).type != DeviceType::cpu)
    return;
  check_memory_limit(result);
  if (!result.ok()) return;
  const DecisionFacts facts = planned_facts(result, *spec, setting.world, setting.local, 0);
  if (const Decision decision = decide_alone(facts); !decision.fits) result.add(explain(facts, decision));
}

void check_tried_run(ConfigResult& result, const RunSetting& setting) {
  try {
    check_run(result, setting);
  } catch (const Error& e) {
    if (e.code() == Exit::internal) throw;
    Diagnostic problem;
    problem.exit = e.code();
    problem.message = e.what();
    result.add({problem});
  }
}

std::optional<ConfigResult> try_config_collectively(comm::World& world, const std::string& path,
                                                    const std::vector<std::string>& overrides,
                                                    RunSetting setting, Diagnostics& found) {
  ConfigResult result;
  std::string text;
  run_collectively(world, [&] {
    if (world.rank() != 0) return;
    result = load_config(path, overrides);
    setting.world = world.size();
    setting.nodes = parallel::nodes_of(world.nodes(), world.hosts());
    setting.local = world.local_size();
    check_run(result, setting);
    found = result.diagnostics;
    if (result.ok()) text = dump_resolved(result);
  });
  world.comm().broadcast_text(text, 0);
  if (text.empty()) return std::nullopt;
  if (world.rank() != 0) result = load_config_text(text, path);
  run_collectively(world, [&] { NRL_CHECK(result.ok(), "the resolved configuration did not read back"); });
  return result;
}

ConfigResult load_config_collectively(comm::World& world, const std::string& path,
                                      const std::vector<std::string>& overrides, RunSetting setting) {
  Diagnostics found;
  auto result = try_config_collectively(world, path, overrides, setting, found);
  if (!found.empty()) output::write(output::Stream::err, render(found));  // on rank 0
  const comm::ErrorConsensus consensus = comm::agree_on_error(world.comm(), exit_code(found), "");
  if (!result) throw AgreedExit{consensus.code};
  order_nodes(world, result->config);
  if (RunControl* control = RunControl::current()) control->connect(world, result->config.reliability);
  return *result;
}

}  // namespace nrl::train
