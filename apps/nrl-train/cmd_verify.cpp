// nrl-train verify: compares the layout of a run with one rank.

#include <cstdint>
#include <memory>
#include <string>

#include <CLI/CLI.hpp>

#include "apps/nrl-train/commands.h"
#include "apps/train/launch/launch.h"
#include "apps/verify/verify.h"

namespace nrl::app {
namespace {

struct VerifyArgs {
  ConfigArgs config;
  int64_t steps = 2;
  int64_t undisturbed = 0;  ///< 0: compare after every step
  bool random_tokens = false;
  std::string layouts = "configured";  ///< configured or auto
  int64_t sample = 0;                  ///< of layouts auto; 0: all
};

int run_verify(const VerifyArgs& args) {
  const auto layouts = args.layouts == "auto"   ? verify::Which::all
                       : args.layouts == "list" ? verify::Which::list
                                                : verify::Which::configured;
  if (args.sample > 0 && layouts == verify::Which::configured)
    fail(Exit::usage, "--sample has no effect without --layouts auto or list. Fix: add it");
  return train::run_in_world(
      [&](comm::World& world) {
        return verify::verify(world, {.config = args.config.path,
                                      .overrides = args.config.overrides,
                                      .steps = args.steps,
                                      .undisturbed = args.undisturbed,
                                      .random_tokens = args.random_tokens,
                                      .layouts = layouts,
                                      .sample = args.sample});
      },
      train::Watch::configured);
}

}  // namespace

void add_verify(CommandLine& line) {
  const auto args = std::make_shared<VerifyArgs>();
  CLI::App* c = line.add(
      "verify", "Compare a few steps of the launched ranks with the same steps on one rank",
      "  mpirun -n 2 nrl-train verify configs/quickstart.yaml distributed.shard_strategy=optim\n"
      "  mpirun -n 4 nrl-train verify configs/gpt2-124m.yaml --layouts auto --random-tokens\n"
      "  mpirun -n 4 nrl-train verify configs/gpt2-124m.yaml --layouts auto --sample 60 --undisturbed 4");
  add_config(c, args->config);
  CLI::Option* const verify_steps =
      c->add_option("--steps", args->steps, "Steps to compare (default 2)")->check(CLI::Range(1, 1000));
  c->add_option("--undisturbed", args->undisturbed,
                "Train N steps as in training (overlap, CUDA graph) and compare when they are done; then an "
                "evaluation, a checkpoint to and from another layout, and N steps from it")
      ->check(CLI::Range(1, 1000))
      ->excludes(verify_steps);
  c->add_flag("--random-tokens", args->random_tokens,
              "Train on random tokens; without it only if the configured data does not exist");
  c->add_option(
       "--layouts", args->layouts,
       "configured (default), auto: every valid layout of the launched ranks, or list: their names only")
      ->check(CLI::IsMember({"configured", "auto", "list"}));
  c->add_option(
       "--sample", args->sample,
       "Only so many of the layouts of --layouts, with as many pairs and triples of options as they can "
       "have")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40));
  line.on(c, [args] { return run_verify(*args); });
}

}  // namespace nrl::app
