// nrl-train profile run: some steps of a training run, recorded.

#include <algorithm>
#include <charconv>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include "apps/nrl-train/commands.h"
#include "apps/train/launch/launch.h"
#include "apps/train/launch/stop_signal.h"
#include "apps/train/start/run_config.h"
#include "apps/train/start/run_data.h"
#include "apps/train/trainer.h"
#include "core/base/error.h"
#include "core/base/output.h"
#include "core/base/text.h"

namespace nrl::app {
namespace {

struct Args : ConfigArgs {
  std::string steps = "5";
  std::string output;
};

/// "5:8", or a number of steps after a warm-up of three.
StepRange steps_of(const std::string& text) {
  constexpr int64_t warmup = 3, most = 10'000;
  if (const auto range = parse_step_range(text)) return *range;
  int64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || at != end || number < 1 || number > most)
    fail(Exit::usage, "--steps {}: expected FIRST:END, counted from 1, or a number from 1 to {}", text, most);
  return {warmup + 1, warmup + 1 + number};
}

/// Nothing but steps: what would divide the window, or what the run would leave behind, is off.
std::vector<std::string> own_overrides(const Args& args) {
  const StepRange steps = steps_of(args.steps);
  std::vector<std::string> out = train::steps_only_overrides(steps.end - 1);
  out.insert(out.end(), {"profiling.enabled=true", "profiling.every=null",
                         fmt::format("profiling.steps={}:{}", steps.first, steps.end)});
  if (!args.output.empty()) out.push_back("logger.log_dir=" + args.output);
  return out;
}

/// The banner shows how it reads what the user wrote; these overrides are ours.
void forget_translations(ConfigResult& config, const std::vector<std::string>& own) {
  std::erase_if(config.translated, [&](const Translation& t) {
    return std::any_of(own.begin(), own.end(), [&](const std::string& o) {
      const size_t equals = o.find('=');
      return t.given == o.substr(0, equals) + ": " + o.substr(equals + 1);
    });
  });
}

int run_profile(const Args& args) {
  std::vector<std::string> overrides = args.overrides;
  const std::vector<std::string> own = own_overrides(args);
  overrides.insert(overrides.end(), own.begin(), own.end());
  train::stop::handle_at_start();
  output::background();
  return train::run_in_world(
      [&](comm::World& world) {
        ConfigResult config =
            train::load_config_collectively(world, args.path, overrides, {.training = true});
        forget_translations(config, own);
        const Exit code = train::train(world, config);
        if (code == Exit::ok && world.rank() == 0) print_profile(config.config.logger.log_dir);
        return static_cast<int>(code);
      },
      train::Watch::configured);
}

}  // namespace

void add_profile_run(CommandLine& line) {
  const auto args = std::make_shared<Args>();
  CLI::App* group = line.find("profile");
  CLI::App* c =
      line.add("run", "Train a few steps and record them, without checkpoints and evaluations",
               "  nrl-train profile run configs/quickstart.yaml --steps 20\n"
               "  mpirun -n 2 nrl-train profile run configs/llama-17m.yaml --steps 5:8 --output logs",
               group);
  add_config(c, *args);
  c->add_option("--steps", args->steps,
                "Steps to record: FIRST:END, counted from 1, END exclusive; or their number after a\n"
                "warm-up of three (default 5)");
  c->add_option("--output", args->output, "Log directory (default: logger.log_dir)");
  line.on(c, [args] { return run_profile(*args); });
}

}  // namespace nrl::app
