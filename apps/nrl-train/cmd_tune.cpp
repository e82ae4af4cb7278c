// nrl-train tune: finds the best value of a key by measuring.

#include "apps/nrl-train/commands.h"
#include "apps/train/launch/launch.h"

namespace nrl::app {

int run_tune(const bench::TuneArgs& args) {
  return train::run_in_world([&](comm::World& world) { return bench::tune_batch_size(world, args); });
}

}  // namespace nrl::app
