// nrl-train verify: compares the layout of a run with one rank.

#include "apps/nrl-train/commands.h"
#include "apps/train/launch/launch.h"
#include "apps/verify/verify.h"

namespace nrl::app {

int run_verify(const VerifyArgs& args) {
  const auto layouts = args.layouts == "auto"   ? verify::Which::all
                       : args.layouts == "list" ? verify::Which::list
                                                : verify::Which::configured;
  if (args.sample > 0 && layouts == verify::Which::configured)
    fail(Exit::usage, "--sample has no effect without --layouts auto or list. Fix: add it");
  return train::run_in_world([&](comm::World& world) {
    return verify::verify(world, {.config = args.config.path,
                                  .overrides = args.config.overrides,
                                  .steps = args.steps,
                                  .undisturbed = args.undisturbed,
                                  .random_tokens = args.random_tokens,
                                  .layouts = layouts,
                                  .sample = args.sample});
  });
}

}  // namespace nrl::app
