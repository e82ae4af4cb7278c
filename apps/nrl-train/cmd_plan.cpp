// nrl-train plan: prints batch arithmetic and memory of a run without running it.

#include <cstdio>

#include "apps/nrl-train/commands.h"
#include "apps/plan/nodes.h"
#include "apps/train/device_choice.h"
#include "apps/train/plan_report.h"
#include "apps/train/run_check.h"

namespace nrl::app {

int run_plan(const PlanArgs& args) {
  ConfigResult result = load_config(args.config.path, args.config.overrides);
  train::check_run(result, {.world = args.world, .files = false, .memory = false});
  if (result.ok())
    result.add(plan::check_nodes(result, plan::configured_nodes(result.config, args.world),
                                 train::choose_device(result.config.device).type));
  std::fputs(render(result.diagnostics).c_str(), stderr);
  if (!result.ok()) return static_cast<int>(result.exit_code());
  train::print_plan(result, args.world, args.buffers);
  return 0;
}

}  // namespace nrl::app
