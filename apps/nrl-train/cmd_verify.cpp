// nrl-train verify: compares the layout of a run with one rank.

#include "apps/nrl-train/commands.h"
#include "apps/train/launch.h"
#include "apps/verify/verify.h"

namespace nrl::app {

int run_verify(const VerifyArgs& args) {
  if (args.sample > 0 && args.layouts != "auto")
    fail(Exit::usage, "--sample has no effect without --layouts auto. Fix: add it");
  return train::run_in_world([&](comm::World& world) {
    return verify::verify(world, {.config = args.config.path,
                                  .overrides = args.config.overrides,
                                  .steps = args.steps,
                                  .random_tokens = args.random_tokens,
                                  .all_layouts = args.layouts == "auto",
                                  .sample = args.sample});
  });
}

}  // namespace nrl::app
