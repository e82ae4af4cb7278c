// nrl-train tune: finds the best value of a key by measuring.

#include <memory>

#include <CLI/CLI.hpp>

#include "apps/bench/batch_size.h"
#include "apps/nrl-train/commands.h"
#include "apps/train/launch/launch.h"

namespace nrl::app {
namespace {

int run_tune(const bench::TuneArgs& args) {
  return train::run_in_world([&](comm::World& world) { return bench::tune_batch_size(world, args); });
}

}  // namespace

void add_tune(CommandLine& line) {
  const auto args = std::make_shared<bench::TuneArgs>();
  CLI::App* tuner =
      line.add("tune", "Find the best value of a key by measuring",
               "  nrl-train tune batch-size configs/quickstart.yaml\n"
               "  mpirun -n 4 nrl-train tune batch-size configs/gpt2-124m.yaml --max-memory 0.5");
  tuner->require_subcommand(1);
  CLI::App* c = line.add("batch-size", "Find the largest and the fastest microbatch",
                         "  nrl-train tune batch-size configs/quickstart.yaml\n"
                         "  nrl-train tune batch-size configs/gpt2-124m.yaml --sizes 1,2,4,8 --steps 5",
                         tuner);
  add_config(c, args->config, args->overrides);
  c->add_option(
       "--max-memory", args->max_memory,
       "Fraction of the GPU's memory, or of the rank's share of the machine's for its whole process\n"
       "(default: memory.max_memory, which in a run limits the plan alone)")
      ->check(finite_range(1e-6, 1));
  c->add_option("--sizes", args->sizes, "Sizes to try, e.g. 1,2,4,8 (default: all that divide the batch)")
      ->delimiter(',')
      ->allow_extra_args(false)  // overrides may follow
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40));
  c->add_option("--steps", args->steps, "Steps to time of each size (default 3)")->check(CLI::Range(1, 1000));
  line.on(c, [args] { return run_tune(*args); });
}

}  // namespace nrl::app
