// nrl-train bench: benchmarks of this machine, relative to its limits.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <sstream>
#include <string_view>
#include <tuple>

#include <time.h>
#include <unistd.h>

#include <CLI/CLI.hpp>

#include "apps/bench/bench.h"
#include "apps/bench/compare.h"
#include "apps/bench/overhead.h"
#include "apps/machine/device_models.h"
#include "apps/monitor/timers.h"
#include "apps/nrl-train/commands.h"
#include "apps/train/launch/launch.h"

namespace nrl::app {
namespace {

/// Wall-clock time of the exec of this process, with a resolution of 10 ms.
double process_start() {
  const std::string stat = [] {
    std::string text(4096, '\0');
    FILE* file = std::fopen("/proc/self/stat", "r");
    if (!file) return std::string();
    text.resize(std::fread(text.data(), 1, text.size(), file));
    std::fclose(file);
    return text;
  }();
  // Field 22. The fields are counted after the process name (field 2), which may contain spaces.
  std::istringstream fields(stat.substr(std::min(stat.size(), stat.rfind(')') + 1)));
  std::string field;
  for (int i = 3; i <= 22; ++i) fields >> field;
  timespec boot{};
  clock_gettime(CLOCK_BOOTTIME, &boot);
  const double since_boot = static_cast<double>(boot.tv_sec) + 1e-9 * static_cast<double>(boot.tv_nsec);
  const double started = std::strtod(field.c_str(), nullptr) / static_cast<double>(sysconf(_SC_CLK_TCK));
  return monitor::wall_seconds() - (since_boot - started);
}

int run_bench(const bench::Args& args) {
  const auto one_of = [&](std::initializer_list<std::string_view> names) {
    return std::find(names.begin(), names.end(), args.benchmark) != names.end();
  };
  // {option, whether it is given, whether the benchmark has it, which do}
  const bool kernels = one_of({"ops", "gemm", "attention"}), generates = one_of({"generate"}),
             calibrates = one_of({"calibrate"}), steps = one_of({"step", "compare", "overhead"});
  const std::tuple<const char*, bool, bool, const char*> options[] = {
      {"--tokens", args.tokens > 0, one_of({"ops"}), "bench ops"},
      {"--predict", !args.predict.empty(), one_of({"step"}), "bench step"},
      {"--roofline", args.roofline, one_of({"step"}), "bench step"},
      {"--profile", !args.profile.empty(), one_of({"step"}), "bench step"},
      {"--only", !args.only.empty(), kernels || one_of({"compare"}), "bench ops, gemm, attention or compare"},
      {"--precision", args.precision != "auto", kernels || generates,
       steps ? "the configuration's policy.precision" : "bench ops, gemm, attention or generate"},
      {"--batch", !args.batches.empty(), generates, "bench generate"},
      {"--prompt-tokens", args.prompt_tokens.has_value(), generates, "bench generate"},
      {"--new-tokens", args.new_tokens.has_value(), generates, "bench generate"},
      {"--page", !args.page.empty(), one_of({"compare"}), "bench compare"},
      {"--with", !args.with.empty(), one_of({"compare"}), "bench compare"},
      {"--history", !args.history.empty(), one_of({"step", "compare"}), "bench step or compare"},
      {"--commit", !args.commit.empty(), !args.history.empty(), "bench step or compare with --history"},
      {"--pairs", args.pairs.has_value(), one_of({"overhead"}), "bench overhead"},
      {"--out", !args.out.empty(), calibrates, "bench calibrate"},
      {"--world", args.ranks.has_value(), calibrates, "bench calibrate"},
      {"--links", args.links, calibrates, "bench calibrate"},
      {"--json", calibrates && !args.json.empty(), false, "--out"},
      {"--steps", args.steps.has_value(), steps || calibrates, "bench step, compare, overhead or calibrate"}};
  for (const auto& [option, given, has, expected] : options)
    if (given && !has)
      fail(Exit::usage, "{} has no effect in bench {}; expected {}", option, args.benchmark, expected);
  if (!one_of({"step", "generate", "comm", "overhead", "compare", "calibrate"}) &&
      (!args.config.empty() || !args.overrides.empty()))
    fail(Exit::usage, "bench {} takes no configuration", args.benchmark);
  if (args.benchmark == "ops") return bench::ops(args);
  if (args.benchmark == "gemm") return bench::gemm(args);
  if (args.benchmark == "attention") return bench::attention(args);
  if (args.benchmark == "comm")
    return train::run_in_world([&](comm::World& world) { return bench::comm(world, args); });
  if (calibrates)
    return train::run_in_world([&](comm::World& world) { return bench::calibrate(world, args); });
  if (args.benchmark == "compare") {
    if (!args.page.empty() && args.json.empty())
      fail(Exit::usage, "--page is made of the file of --json. Fix: add --json FILE");
    if (!args.with.empty() && args.page.empty())
      fail(Exit::usage, "--with has no effect without --page. Fix: add --page FILE");
    if (args.suite.empty())
      fail(Exit::usage,
           "bench compare needs a suite, e.g. nrl-train bench compare configs/suites/claims.yaml");
    return train::run_in_world([&](comm::World& world) { return bench::compare(world, args); },
                               train::Watch::configured);
  }
  if (args.config.empty())
    fail(Exit::usage, "bench {0} needs a configuration, e.g. nrl-train bench {0} configs/bench-tiny.yaml",
         args.benchmark);
  if (generates) return bench::generate(args);
  if (args.benchmark == "overhead")
    return train::run_in_world([&](comm::World& world) { return bench::overhead(world, args); },
                               train::Watch::configured);
  if (comm::launched_with_peers() && !args.predict.empty())
    fail(Exit::usage, "bench step --predict runs on one rank only. Fix: leave --predict out");
  if (!args.profile.empty() && !args.predict.empty())
    fail(Exit::usage, "bench step takes --predict or --profile. Fix: leave one of them out");
  const double start = process_start();
  return train::run_in_world(
      [&](comm::World& world) {
        const int code = bench::step(world, args, start);
        if (code == 0 && !args.profile.empty() && world.rank() == 0) print_profile(args.profile);
        return code;
      },
      train::Watch::configured);
}

}  // namespace

void add_bench(CommandLine& line) {
  const auto args = std::make_shared<bench::Args>();
  CLI::App* c = line.add(
      "bench", "Benchmark this machine relative to its limits",
      "  nrl-train bench gemm\n"
      "  nrl-train bench step configs/quickstart.yaml --steps 50\n"
      "  mpirun -n 2 nrl-train bench step configs/llama-17m.yaml --roofline\n"
      "  mpirun -n 4 nrl-train bench comm\n"
      "  mpirun -n 4 nrl-train bench comm configs/quickstart.yaml distributed.tensor_parallel_size=2\n"
      "  nrl-train bench calibrate configs/llama-17m.yaml --world 8 --out profile.json\n"
      "  nrl-train bench compare configs/suites/claims.yaml --only recompute");
  c->add_option(
       "benchmark", args->benchmark,
       "ops: memory-bound kernels; gemm: matmuls; attention;\n"
       "step: training steps of CONFIG on random tokens; generate: generation with random weights for\n"
       "the model of CONFIG; comm: communication, in the groups of\n"
       "CONFIG, or inside and across nodes; calibrate: a profile of this device and its links, for\n"
       "nrl-train plan --profile; overhead: steps of CONFIG on its data with all monitoring\n"
       "beside steps without;\n"
       "compare SUITE [CONFIG]: variants of CONFIG, by default that of the suite, beside what is\n"
       "promised of them, as the YAML file SUITE says")
      ->required()
      ->check(CLI::IsMember(
          {"ops", "gemm", "attention", "step", "generate", "comm", "calibrate", "overhead", "compare"}));
  add_config(c, args->config, args->overrides,
             "YAML file, for step, generate, comm, calibrate, overhead and compare, with key=value after it",
             false, [args] { return args->benchmark == "compare" ? &args->suite : nullptr; });
  c->add_option("--device", args->device, "auto (default), cpu or cuda")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  c->add_option(
       "--precision", args->precision,
       "Of ops, gemm, attention and generate: auto (default: bfloat16 on a GPU, else float32; generate on a\n"
       "CPU: both), float32, bfloat16 or float16")
      ->check(CLI::IsMember({"auto", "float32", "bfloat16", "float16"}));
  c->add_option("--batch", args->batches, "Numbers of sequences (generate; default 1,16)")
      ->delimiter(',')
      ->check(CLI::Range(1, 4096));
  c->add_option("--prompt-tokens", args->prompt_tokens, "Tokens of each prompt (generate; default 128)")
      ->check(CLI::Range(1, 1 << 20));
  c->add_option("--new-tokens", args->new_tokens, "Tokens generated after each prompt (generate; default 64)")
      ->check(CLI::Range(2, 1 << 20));
  c->add_option("--out", args->out, "The file of the profile (calibrate)");
  c->add_option(
       "--world", args->ranks,
       "Ranks of the layout whose first, middle and last stage are timed (calibrate; default: those\n"
       "that are started)")
      ->check(CLI::Range(1, 1 << 20));
  c->add_flag("--links", args->links, "Also time operations between the ranks that are started (calibrate)");
  c->add_option("--json", args->json, "Write the results to this file");
  c->add_option(
      "--history", args->history,
      "Append the figures as lines to this file, which nrl-train report --history reads (step, compare)");
  c->add_option("--commit", args->commit, "What is measured, for --history (default: the version)");
  c->add_option("--page", args->page, "Write promises beside measurements to this Markdown file (compare)");
  c->add_option("--with", args->with, "Results of another launch for --page: a file that --json wrote")
      ->allow_extra_args(false);
  c->add_option("--only", args->only,
                "Only cases whose name contains this text (ops, gemm, attention, compare)");
  c->add_option(
       "--steps", args->steps,
       "Steps to time (step and compare; default 20; calibrate: 5), or of a block (overhead; default 10)")
      ->check(CLI::Range(1, 100000));
  c->add_option("--pairs", args->pairs, "Pairs of blocks (overhead; default 40)")
      ->check(CLI::Range(2, 10000));
  c->add_option("--tokens", args->tokens,
                "Tokens of the activations (ops; default 8192 on a GPU, 2048 on a CPU)")
      ->check(CLI::Range(1, 1 << 20));
  c->add_option("--predict", args->predict,
                "Print the estimated time of every part of a step on this GPU (step): " +
                    machine::device_model_names());
  c->add_flag(
      "--roofline", args->roofline,
      "Print every kernel of a step beside what this machine could reach, and the time lost (step on\n"
      "a CPU)");
  c->add_option(
      "--profile", args->profile,
      "Then record as many steps, in this log directory, and print where their time and memory went (step)");
  c->add_flag("--quick", args->quick,
              "Tiny sizes, executed once, whatever --steps says: a functional test without useful timings");
  line.on(c, [args] { return run_bench(*args); });
}

}  // namespace nrl::app
