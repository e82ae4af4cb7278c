// nrl-train tune: finds the best value of a key by measuring.

#include <memory>

#include <CLI/CLI.hpp>

#include "apps/nrl-train/commands.h"
#include "apps/train/launch/launch.h"
#include "apps/tune/batch_size.h"
#include "apps/tune/kernels.h"
#include "apps/tune/layouts.h"
#include "apps/tune/tune_lr.h"

namespace nrl::app {
namespace {

template <class Args>
std::function<int()> in_world(std::shared_ptr<Args> args, int (*tune)(comm::World&, const Args&)) {
  return [args, tune] {
    return train::run_in_world([&](comm::World& world) { return tune(world, *args); },
                               train::Watch::configured);
  };
}

void add_batch_size(CommandLine& line, CLI::App* tuner) {
  const auto args = std::make_shared<tune::BatchSizeArgs>();
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
  line.on(c, in_world(args, tune::tune_batch_size));
}

void add_lr(CommandLine& line, CLI::App* tuner) {
  const auto args = std::make_shared<tune::LrArgs>();
  CLI::App* c =
      line.add("lr", "Find the learning rate by a range test on the configured data",
               "  nrl-train tune lr configs/quickstart.yaml\n"
               "  mpirun -n 2 nrl-train tune lr configs/llama-17m.yaml --from 1e-5 --to 1 --steps 200",
               tuner);
  add_config(c, args->config, args->overrides);
  c->add_option("--from", args->from, "First learning rate (default 1e-7)")->check(finite_range(1e-12, 1e3));
  c->add_option("--to", args->to, "Last learning rate (default 0.1)")->check(finite_range(1e-12, 1e3));
  c->add_option("--steps", args->steps, "Steps, each with a higher rate (default 100)")
      ->check(CLI::Range(int64_t{10}, int64_t{100000}));
  c->add_option("--json", args->json, "Write points and choice to this file");
  c->add_option("--html", args->html, "Write the curve as a page to this file");
  line.on(c, in_world(args, tune::tune_lr));
}

void add_layout(CommandLine& line, CLI::App* tuner) {
  const auto args = std::make_shared<tune::LayoutArgs>();
  CLI::App* c = line.add("layout", "Measure the layouts that plan --search finds for these ranks",
                         "  mpirun -n 2 nrl-train tune layout configs/llama-17m.yaml\n"
                         "  mpirun -n 4 nrl-train tune layout configs/llama-17m.yaml --measure 8 --rounds 5",
                         tuner);
  add_config(c, args->config, args->overrides);
  c->add_option("--measure", args->measure, "Layouts to measure beside the configured one (default 5)")
      ->check(CLI::Range(1, 100));
  c->add_option("--rounds", args->rounds, "Rounds in which all are timed in turn (default 3)")
      ->check(CLI::Range(1, 100));
  c->add_option("--steps", args->steps, "Steps to time in each round (default 5)")
      ->check(CLI::Range(1, 1000));
  c->add_option("--json", args->json, "Write the table to this file");
  line.on(c, in_world(args, tune::tune_layout));
}

void add_kernels(CommandLine& line, CLI::App* tuner) {
  const auto args = std::make_shared<tune::KernelArgs>();
  CLI::App* c =
      line.add("kernels", "Measure steps with each choice of kernels: instruction sets, or timed GEMMs",
               "  nrl-train tune kernels configs/llama-17m.yaml\n"
               "  nrl-train tune kernels configs/gpt2-124m.yaml kernels.gemm_tuning=tuning",
               tuner);
  add_config(c, args->config, args->overrides);
  c->add_option("--rounds", args->rounds, "Rounds in which all are timed in turn (default 3)")
      ->check(CLI::Range(1, 100));
  c->add_option("--steps", args->steps, "Steps to time in each round (default 5)")
      ->check(CLI::Range(1, 1000));
  c->add_option("--json", args->json, "Write the table to this file");
  line.on(c, in_world(args, tune::tune_kernels));
}

}  // namespace

void add_tune(CommandLine& line) {
  CLI::App* tuner = line.add("tune", "Find the best value of a key by measuring",
                             "  nrl-train tune batch-size configs/quickstart.yaml\n"
                             "  nrl-train tune lr configs/quickstart.yaml\n"
                             "  mpirun -n 2 nrl-train tune layout configs/llama-17m.yaml");
  tuner->require_subcommand(1);
  add_batch_size(line, tuner);
  add_lr(line, tuner);
  add_layout(line, tuner);
  add_kernels(line, tuner);
}

}  // namespace nrl::app
