#include "apps/train/launch.h"

#include <algorithm>

#include "apps/plan/nodes.h"
#include "core/base/log.h"
#include "core/base/output.h"
#include "core/base/threads.h"
#include "parallel/grid/nodes.h"

namespace nrl::train {

int run_in_world(const std::function<int(comm::World&)>& body) {
  const auto world = comm::World::init();
  log::init(world->rank(), world->size());
  try {
    const int code = body(*world);
    world->finalize();
    return code;
  } catch (const AgreedExit& agreed) {
    // All ranks reach this with the same code.
    world->mark_failed();
    world->finalize();
    return static_cast<int>(agreed.code);
  } catch (const std::exception& e) {
    // The other ranks may be blocked in communication, so they must be aborted.
    const Error error = error_from(e);
    log::error_text(error.what());
    if (world->size() > 1) world->abort(error.code());
    world->mark_failed();
    return static_cast<int>(error.code());
  }
}

engine::StepResult collect_step(comm::World& world, engine::Engine& engine) {
  try {
    return engine.collect();
  } catch (const engine::StepStuck& e) {
    log::error_text(e.what());
    world.abort(e.code());
  }
}

comm::ErrorConsensus attempt_collectively(comm::World& world, const std::function<void()>& work) {
  return comm::attempt_on_all(world.comm(), work);
}

void run_collectively(comm::World& world, const std::function<void()>& work) {
  require_agreed(world, attempt_collectively(world, work));
}

void require_agreed(comm::World& world, const comm::ErrorConsensus& consensus) {
  if (consensus.code == Exit::ok) return;
  if (world.rank() == consensus.rank) log::error_text(consensus.message);
  throw AgreedExit{consensus.code};
}

namespace {

// Renumbers the ranks if the grid lies better on another order of nodes of different sizes.
void order_nodes(comm::World& world, const Config& config) {
  const std::vector<ClusterNode> nodes = parallel::nodes_of(world.nodes(), world.hosts());
  const std::vector<int> order = plan::node_order(config, nodes);
  if (std::is_sorted(order.begin(), order.end())) return;
  std::vector<int> ranks;
  for (const int node : order)
    for (int r = 0; r < world.size(); ++r)
      if (world.nodes()[static_cast<size_t>(r)] == node) ranks.push_back(r);
  world.reorder(ranks);
  log::init(world.rank(), world.size());
}

}  // namespace

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
  return *result;
}

}  // namespace nrl::train
