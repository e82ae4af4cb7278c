// nrl-train bench: benchmarks of this machine, relative to its limits.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <sstream>
#include <string_view>
#include <tuple>

#include <time.h>
#include <unistd.h>

#include "apps/nrl-train/commands.h"
#include "apps/train/launch/launch.h"
#include "apps/train/report/timers.h"

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
  return train::wall_seconds() - (since_boot - started);
}

}  // namespace

int run_bench(const bench::Args& args) {
  const auto one_of = [&](std::initializer_list<std::string_view> names) {
    return std::find(names.begin(), names.end(), args.benchmark) != names.end();
  };
  // {option, whether it is given, whether the benchmark has it, which do}
  const bool kernels = one_of({"ops", "gemm", "attention"}), steps = one_of({"step", "compare"});
  const std::tuple<const char*, bool, bool, const char*> options[] = {
      {"--tokens", args.tokens > 0, one_of({"ops"}), "bench ops"},
      {"--predict", !args.predict.empty(), one_of({"step"}), "bench step"},
      {"--only", !args.only.empty(), kernels || one_of({"compare"}), "bench ops, gemm, attention or compare"},
      {"--precision", args.precision != "auto", kernels,
       steps ? "the configuration's policy.precision" : "bench ops, gemm or attention"},
      {"--steps", args.steps.has_value(), steps, "bench step or compare"}};
  for (const auto& [option, given, has, expected] : options)
    if (given && !has)
      fail(Exit::usage, "{} has no effect in bench {}; expected {}", option, args.benchmark, expected);
  if (!one_of({"step", "comm", "compare"}) && (!args.config.empty() || !args.overrides.empty()))
    fail(Exit::usage, "bench {} takes no configuration", args.benchmark);
  if (args.benchmark == "ops") return bench::ops(args);
  if (args.benchmark == "gemm") return bench::gemm(args);
  if (args.benchmark == "attention") return bench::attention(args);
  if (args.benchmark == "comm")
    return train::run_in_world([&](comm::World& world) { return bench::comm(world, args); });
  if (args.benchmark == "compare") {
    if (args.suite.empty())
      fail(Exit::usage,
           "bench compare needs a suite, e.g. nrl-train bench compare configs/suites/claims.yaml");
    return train::run_in_world([&](comm::World& world) { return bench::compare(world, args); });
  }
  if (args.config.empty())
    fail(Exit::usage, "bench {0} needs a configuration, e.g. nrl-train bench {0} configs/bench-tiny.yaml",
         args.benchmark);
  if (comm::launched_with_peers())
    fail(Exit::usage,
         "bench step runs on one rank only. Fix: to measure several ranks, train and read "
         "LOG_DIR/metrics.jsonl");
  const double start = process_start();
  return train::run_in_world([&](comm::World& world) { return bench::step(world, args, start); });
}

}  // namespace nrl::app
