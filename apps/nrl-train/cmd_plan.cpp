// nrl-train plan: prints batch arithmetic and memory of a run without running it, or searches layouts.

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <unistd.h>

#include <CLI/CLI.hpp>

#include "apps/check/check.h"
#include "apps/monitor/terminal.h"
#include "apps/nrl-train/commands.h"
#include "apps/plan/nodes.h"
#include "apps/planner/progress.h"
#include "apps/planner/report.h"
#include "apps/planner/search.h"
#include "apps/state/model_source.h"
#include "apps/train/launch/device_choice.h"
#include "apps/train/start/decide.h"
#include "apps/train/start/run_check.h"
#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/base/text.h"
#include "parallel/comm/world/world.h"

namespace nrl::app {
namespace {

struct PlanArgs {
  ConfigArgs config;
  int world = 1;  ///< ranks to plan for
  std::string device =
      "auto";            ///< auto: as configured; cpu, cuda, or the name of a GPU (machine::DeviceModel)
  bool buffers = false;  ///< list every buffer
  std::optional<int> program = {};         ///< print the program of this rank alone
  int search = 0;                          ///< number of layouts to show instead of the configured one
  std::optional<double> expert_load = {};  ///< of the search
};

int report(const ConfigResult& result) {
  std::fputs(render(result.diagnostics).c_str(), stderr);
  return result.ok() ? 0 : static_cast<int>(result.exit_code());
}

/// Groups of a layout of several axes, with other ranks. The search counts on as many for every layout.
constexpr int usual_communicators = 4;

int search(const PlanArgs& args, const std::vector<std::string>& overrides, const ConfigResult& config,
           const machine::DeviceModel* gpu) {
  const Config& c = config.config;
  if (!gpu && train::choose_device(c.device).type == DeviceType::cuda)
    fail(Exit::usage, "--search: the GPU is not known. Fix: add --device with one of {}",
         machine::device_model_names());
  const int local = plan::local_sizes(c, args.world).front();
  const int threads = train::threads_for(c.kernels, local);
  const predict::ModeledDevice device(gpu ? *gpu : machine::measure_cpu_model(local, threads), c.kernels.tf32,
                                      threads);
  const model::ModelSpec spec = train::load_model_spec(config);
  if (args.expert_load && spec.moe.experts == 0)
    fail(Exit::usage, "--expert-load has no effect: a {} model has no experts. Fix: leave it out",
         name_of(spec.family));
  const int communicators = args.world > 1 ? usual_communicators : 0;
  planner::SearchProgress progress(monitor::terminal_columns(STDERR_FILENO), [](std::string_view text) {
    std::fwrite(text.data(), 1, text.size(), stderr);
    std::fflush(stderr);
  });
  const double start = steady_seconds();
  const planner::Result result = planner::search_layouts(
      {.config = args.config.path,
       .overrides = overrides,
       .world = args.world,
       .capacity = c.memory.max_memory * static_cast<double>(device.model().for_plan(communicators)),
       .expert_load = args.expert_load.value_or(1),
       .progress = [&](size_t done, size_t total) { progress(done, total, steady_seconds() - start); }},
      device);
  progress.finish();
  log::info("model    {} parameters, sequences of {} tokens, {} per step",
            grouped(model::make_parameters(spec).total()), c.policy.max_total_sequence_length,
            c.policy.train_global_batch_size);
  const std::string ranks =
      gpu ? counted(args.world, fmt::format("{} GPU", gpu->product).c_str())
          : fmt::format("{} of {} on this CPU", counted(args.world, "rank"), counted(threads, "thread"));
  log::info("device   {}: {} each, of which {:.0f} % are for the plan", ranks,
            human_bytes(device.model().for_plan(communicators)), 100 * c.memory.max_memory);
  if (result.found.empty()) {
    if (result.tried == 0)
      fail(Exit::config,
           "--search: no layout of {} suits this model and batch. Fix: choose a number of ranks, or a "
           "policy.train_global_batch_size, with more divisors",
           counted(args.world, "rank"));
    fail(Exit::out_of_memory,
         "--search: none of {} fits: the smallest needs {} per rank. Fix: use more ranks",
         counted(result.tried, "layout"), human_bytes(static_cast<uint64_t>(result.least_memory)));
  }
  log::info("{}", planner::table(result, device, args.world,
                                 model::training_flops_per_token(spec, c.policy.max_total_sequence_length),
                                 static_cast<size_t>(args.search)));
  if (c.policy.offload_optimizer.value > 0 || c.policy.offload_activations.value > 0)
    log::warn("the times do not contain copies to and from the host (policy.offload_*)");
  return 0;
}

int run_plan(const PlanArgs& args) {
  if (comm::launched_with_peers())
    fail(Exit::usage, "plan is one process. Fix: start it without a launcher, for N ranks with --world N");
  std::vector<std::string> overrides = args.config.overrides;
  const bool named = args.device != "auto" && args.device != "cpu" && args.device != "cuda";
  const machine::DeviceModel* gpu = named ? &machine::find_device_model("--device", args.device) : nullptr;
  if (args.device != "auto") overrides.push_back("device=" + (named ? std::string("cuda") : args.device));
  ConfigResult result = load_config(args.config.path, overrides);
  const bool layouts = args.search > 0;
  if (layouts && args.buffers)
    fail(Exit::usage, "--buffers has no effect with --search, which plans many layouts. Fix: leave one out");
  if (args.program) {
    if (layouts || args.buffers)
      fail(Exit::usage, "--program prints nothing else. Fix: leave out {}",
           layouts ? "--search" : "--buffers");
    if (*args.program >= args.world)
      fail(Exit::usage, "--program {}: the ranks are 0 to {} (--world {})", *args.program, args.world - 1,
           args.world);
  }
  if (args.expert_load && !layouts)
    fail(Exit::usage,
         "--expert-load changes the times of --search only. Fix: add --search N, or leave it out");
  const std::optional<model::ModelSpec> spec = train::check_but_memory(
      result, {.world = layouts ? 0 : args.world, .count = RankCount::planned, .files = false});
  if (gpu && result.ok()) result.add(check::check_fp8_on_gpu(result, *spec, *gpu));
  if (layouts) return result.ok() ? search(args, overrides, result, gpu) : report(result);
  if (!result.ok()) return report(result);
  train::DeviceChoice device = train::choose_device(result.config.device);
  if (gpu) device.memory = gpu->for_plan(train::communicators_of_run(result, args.world));
  result.add(plan::check_nodes(result, plan::configured_nodes(result.config, args.world), device.type));
  if (!result.ok()) return report(result);
  BatchPlan batch = resolve_batch(result.config, args.world);
  const bool known = planner::knows_memory(result.config, args.world, device);
  if (known) train::check_memory_limit(result);
  if (known && result.ok()) {
    const std::vector<int> local = plan::local_sizes(result.config, args.world);
    const train::DecisionFacts facts = train::planned_facts(
        result, *spec, args.world, *std::max_element(local.begin(), local.end()), device.memory);
    const train::Decision decision = train::decide_alone(facts);
    if (decision.fits) batch = decision.batch;
    result.add(explain(facts, decision));
  }
  // On another machine the run may well fit.
  if (planner::assumes_this_machine(result.config, args.world, device))
    for (Diagnostic& d : result.diagnostics)
      if (d.severity == Severity::error && d.exit == Exit::out_of_memory) {
        d.severity = Severity::warning;
        d.notes.push_back(fmt::format(
            "that is for all {} ranks on this machine, which would refuse the run. Fix: to plan for others, "
            "name a "
            "GPU (--device h100) or the ranks of a node (cluster.gpus_per_node); for this one, --device cpu",
            args.world));
      }
  const int code = report(result);  // a run that is too large is shown as well
  if (args.program)
    planner::print_program(result, args.world, batch, *args.program, device);
  else
    planner::print_plan(result, args.world, batch, device, gpu, args.buffers);
  return code;
}

}  // namespace

void add_plan(CommandLine& line) {
  const auto args = std::make_shared<PlanArgs>();
  CLI::App* c = line.add("plan", "Print batch arithmetic, grid and memory of a run without running it",
                         "  nrl-train plan configs/gpt2-124m.yaml --world 8\n"
                         "  nrl-train plan configs/gpt2-124m.yaml --device h100 --buffers\n"
                         "  nrl-train plan configs/gpt2-124m.yaml --world 8 --device h100 --search 5");
  add_config(c, args->config);
  c->add_option("--world", args->world, "Ranks to plan for")->check(CLI::Range(1, 1 << 20));
  c->add_option(
      "--device", args->device,
      "auto (as configured), cpu, cuda, or a GPU that need not be there: " + machine::device_model_names());
  c->add_flag("--buffers", args->buffers, "List every planned buffer");
  c->add_option("--program", args->program,
                "Print the program of a rank, all that it does in an optimizer step, and nothing else")
      ->type_name("RANK")
      ->check(CLI::NonNegativeNumber);
  c->add_option("--search", args->search,
                "Show the N layouts of the ranks that are estimated to be the fastest")
      ->check(CLI::Range(1, 1000));
  c->add_option("--expert-load", args->expert_load,
                "--search: rows that the experts of the busiest rank get, over those of a balanced router "
                "(default 1)")
      ->check(CLI::Range(1.0, 1e6));
  line.on(c, [args] { return run_plan(*args); });
}

}  // namespace nrl::app
