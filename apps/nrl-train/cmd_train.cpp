// nrl-train CONFIG.yaml: the training run.

#include <memory>

#include <CLI/CLI.hpp>

#include "apps/nrl-train/commands.h"
#include "apps/nrl-train/nsys.h"
#include "apps/train/launch/faults.h"
#include "apps/train/launch/launch.h"
#include "apps/train/launch/stop_signal.h"
#include "apps/train/start/run_config.h"
#include "apps/train/trainer.h"
#include "core/base/output.h"

namespace nrl::app {
namespace {

int run_train(const ConfigArgs& args) {
  start_under_nsys(args);
  train::fault::requested();  // a mistake in it ends the program here
  train::stop::handle_at_start();
  output::background();
  return train::run_in_world(
      [&](comm::World& world) {
        const ConfigResult config =
            train::load_config_collectively(world, args.path, args.overrides, {.training = true});
        return static_cast<int>(train::train(world, config));
      },
      train::Watch::configured);
}

}  // namespace

void add_train(CommandLine& line) {
  const auto args = std::make_shared<ConfigArgs>();
  CLI::App* c =
      line.add("train", "Train (the default command)",
               "  nrl-train configs/quickstart.yaml\n"
               "  nrl-train configs/quickstart.yaml policy.optimizer.lr=1e-3 pretrain.max_num_steps=200\n"
               "  mpirun -n 8 nrl-train configs/gpt2-124m.yaml distributed.shard_strategy=optim");
  add_config(c, *args);
  line.on(c, [args] { return run_train(*args); });
}

}  // namespace nrl::app
