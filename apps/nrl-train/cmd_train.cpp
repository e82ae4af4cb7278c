// nrl-train CONFIG.yaml: the training run.

#include "apps/nrl-train/commands.h"
#include "apps/train/launch/launch.h"
#include "apps/train/launch/stop_signal.h"
#include "apps/train/start/run_config.h"
#include "apps/train/trainer.h"
#include "core/base/output.h"

namespace nrl::app {

int run_train(const ConfigArgs& args) {
  train::stop::handle_at_start();
  output::background();
  return train::run_in_world([&](comm::World& world) {
    const ConfigResult config =
        train::load_config_collectively(world, args.path, args.overrides, {.training = true});
    return static_cast<int>(train::train(world, config));
  });
}

}  // namespace nrl::app
