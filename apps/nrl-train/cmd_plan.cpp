// nrl-train plan: prints batch arithmetic and memory of a run without running it, or searches layouts.

#include <algorithm>
#include <cstdio>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

#include <CLI/CLI.hpp>

#include "apps/machine/trainer_kernels.h"
#include "apps/monitor/terminal.h"
#include "apps/nrl-train/commands.h"
#include "apps/plan/nodes.h"
#include "apps/planner/pictures.h"
#include "apps/planner/planned_run.h"
#include "apps/planner/progress.h"
#include "apps/planner/report.h"
#include "apps/planner/search.h"
#include "apps/planner/timeline.h"
#include "apps/planner/what_if.h"
#include "apps/state/model_source.h"
#include "apps/train/launch/device_choice.h"
#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/base/output.h"
#include "core/base/text.h"
#include "core/device/cpu/features.h"
#include "core/io/atomic_file.h"
#include "core/io/json.h"
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
  std::vector<std::string> what_if = {};   ///< keys of other plans, side by side
  std::string json = {};                   ///< file, or "-"
  std::string profile = {};                ///< file of measured rates
  std::string trainer = {};                ///< whose kernels are estimated; empty: ours
  std::string trace = {};                  ///< file of trace events
  std::string html = {};                   ///< file of a page
  bool diagram = false;                    ///< print the pipeline
  double within = 0;                       ///< percent; of the search
  std::vector<std::string> fixed = {};     ///< key=value; of the search
  std::string objective = "time";          ///< of the search
};

int report(const ConfigResult& result) {
  std::fputs(render(result.diagnostics).c_str(), stderr);
  return result.ok() ? 0 : static_cast<int>(result.exit_code());
}

void write_json(const std::string& path, const JsonValue& value) {
  const std::string text = value.dump(2) + "\n";
  if (path == "-")
    output::write(output::Stream::out, text);
  else
    write_file_atomic(path, text);
}

/// Groups of a layout of several axes, with other ranks. The search counts on as many for every layout.
constexpr int usual_communicators = 4;

planner::Objective objective_of(const PlanArgs& args) {
  return args.objective == "cost"     ? planner::Objective::cost
         : args.objective == "energy" ? planner::Objective::energy
                                      : planner::Objective::time;
}

JsonValue json_of(const planner::Result& result, const PlanArgs& args) {
  std::vector<JsonValue> rows;
  for (const planner::Found& f : result.found)
    rows.push_back(JsonValue::object({{"keys", JsonValue(f.keys)},
                                      {"memory_bytes", f.memory},
                                      {"tokens_per_step", f.tokens},
                                      {"value", f.value},
                                      {"estimate", planner::json_of(f.estimate)}}));
  return JsonValue::object({{"schema", 1},
                            {"objective", args.objective},
                            {"trainer", args.trainer.empty() ? JsonValue() : JsonValue(args.trainer)},
                            {"tried", result.tried},
                            {"too_large", result.too_large},
                            {"layouts", JsonValue(std::move(rows))}});
}

planner::PlanRequest request_of(const PlanArgs& args, std::vector<std::string> overrides) {
  return {.config = args.config.path,
          .overrides = std::move(overrides),
          .world = args.world,
          .device = args.device,
          .profile = args.profile,
          .trainer = args.trainer};
}

void write_page(const std::string& path, const PlanArgs& args, const planner::RunEstimate& estimate,
                const predict::DryStages& stages, std::span<const planner::LayoutPoint> layouts = {},
                std::span<const plan::RunPlan* const> plans = {}) {
  const std::string heading =
      fmt::format("{}{}{}: {}, {}", args.config.path, args.config.overrides.empty() ? "" : " ",
                  fmt::join(args.config.overrides, " "), counted(args.world, "rank"),
                  stages.device().model().name) +
      (estimate.trainer.empty() ? "" : ", kernels of " + estimate.trainer) +
      (layouts.empty() ? "" : ": " + layouts.front().name);
  write_file_atomic(path, planner::plan_page(heading, estimate, stages, layouts, plans));
}

/// The page of the first layout with the others as points.
void write_page(const std::string& path, const PlanArgs& args, const planner::Result& result) {
  planner::PlanRequest request = request_of(args, args.config.overrides);
  request.of_search = true;
  for (const auto& keys : {args.fixed, result.found.front().keys})
    request.overrides.insert(request.overrides.end(), keys.begin(), keys.end());
  planner::PlannedRun run = planner::prepare(request);
  NRL_CHECK(run.complete, "the layout that was found is refused: {}", render(run.result.diagnostics));
  planner::EstimatedStages stages;
  const planner::RunEstimate estimate = planner::estimate_run(run, &stages);
  NRL_CHECK(estimate.unknown.empty(), "the layout that was found has no estimate: {}", estimate.unknown);
  std::vector<planner::LayoutPoint> points;
  for (const planner::Found& f : result.found)
    points.push_back({f.layout.name(args.world), f.estimate.step, f.memory});
  write_page(path, args, estimate, *stages.stages, points);
}

int search(const PlanArgs& args, const planner::PlannedRun& run) {
  const ConfigResult& config = run.result;
  const machine::DeviceModel* const gpu = run.gpu;
  const Config& c = config.config;
  if (!gpu && train::choose_device(c.device).type == DeviceType::cuda)
    fail(Exit::usage, "--search: the GPU is not known. Fix: add --device with one of {}",
         machine::device_model_names());
  const int local = plan::local_sizes(c, args.world).front();
  const int threads = train::threads_for(c.kernels, local);
  std::string unknown;
  const std::optional<machine::DeviceModel> found = planner::model_of(run, threads, unknown);
  NRL_CHECK(found, "{}", unknown);  // a CPU, or a GPU that was named
  const machine::DeviceModel& rates = *found;
  const predict::ModeledDevice device(rates, c.kernels.tf32, threads,
                                      run.profile ? std::optional(*run.profile) : std::nullopt);
  const planner::Objective objective = objective_of(args);
  if (const std::string problem = planner::objective_problem(objective, c, rates); !problem.empty())
    fail(Exit::usage, "--objective {}: {}", args.objective, problem);
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
       .overrides = run.overrides,
       .world = args.world,
       .capacity = c.memory.max_memory * static_cast<double>(device.model().for_plan(communicators)),
       .expert_load = args.expert_load.value_or(1),
       .best = static_cast<size_t>(std::max(args.search, 8)),
       .objective = objective,
       .within = args.within / 100,
       .fixed = args.fixed,
       .threads = cpu::available_cores(),
       .progress = [&](size_t done, size_t total) { progress(done, total, steady_seconds() - start); }},
      device);
  progress.finish();
  const bool prints = args.json != "-";
  if (prints)
    log::info("model    {} parameters, sequences of {} tokens, {} per step",
              grouped(model::make_parameters(spec).total()), c.policy.max_total_sequence_length,
              c.policy.train_global_batch_size);
  const std::string ranks =
      gpu ? counted(args.world, fmt::format("{} GPU", gpu->product).c_str())
          : fmt::format("{} of {} on this CPU", counted(args.world, "rank"), counted(threads, "thread"));
  if (prints)
    log::info("device   {}: {} each, of which {:.0f} % are for the plan", ranks,
              human_bytes(device.model().for_plan(communicators)), 100 * c.memory.max_memory);
  if (result.found.empty()) {
    if (result.tried == 0)
      fail(Exit::config,
           "--search: no layout of {} suits this model and batch. Fix: choose a number of ranks, or a "
           "policy.train_global_batch_size, with more divisors",
           counted(args.world, "rank"));
    if (result.least_memory == INT64_MAX && !result.refused.empty())
      fail(Exit::config, "--search: all layouts of {} are refused, the first one because of\n{}",
           counted(args.world, "rank"), result.refused);
    fail(Exit::out_of_memory,
         "--search: none of {} fits: the smallest needs {} per rank. Fix: use more ranks",
         counted(result.tried, "layout"), human_bytes(static_cast<uint64_t>(result.least_memory)));
  }
  if (!args.json.empty()) write_json(args.json, json_of(result, args));
  if (args.json == "-") {
    if (!args.html.empty()) write_page(args.html, args, result);
    return 0;
  }
  size_t shown = static_cast<size_t>(args.search);
  const double most = result.found.front().value * (1 + args.within / 100);
  while (args.within > 0 && shown < result.found.size() && result.found[shown].value <= most) ++shown;
  log::info("{}", planner::table(result, device, args.world,
                                 model::training_flops_per_token(spec, c.policy.max_total_sequence_length),
                                 shown, objective, args.trainer));
  if (!args.html.empty()) {
    write_page(args.html, args, result);
    log::info("wrote    {}", args.html);
  }
  return 0;
}

/// Options that have no effect together.
void check_options(const PlanArgs& args) {
  const bool layouts = args.search > 0;
  if (layouts && args.buffers)
    fail(Exit::usage, "--buffers has no effect with --search, which plans many layouts. Fix: leave one out");
  if (args.program) {
    if (layouts || args.buffers || !args.json.empty() || !args.what_if.empty())
      fail(Exit::usage, "--program prints nothing else. Fix: leave out {}",
           layouts              ? "--search"
           : args.buffers       ? "--buffers"
           : !args.json.empty() ? "--json"
                                : "--what-if");
    if (*args.program >= args.world)
      fail(Exit::usage, "--program {}: the ranks are 0 to {} (--world {})", *args.program, args.world - 1,
           args.world);
  }
  if (const char* option = !args.trace.empty() ? "--trace"
                           : args.diagram      ? "--diagram"
                                               : nullptr;
      option && (layouts || args.program || !args.what_if.empty()))
    fail(Exit::usage, "{} is of the step of one plan. Fix: leave out {}", option,
         layouts        ? "--search"
         : args.program ? "--program"
                        : "--what-if");
  if (!args.html.empty() && args.expert_load)
    fail(Exit::usage, "--html draws a step with a balanced router. Fix: leave out --expert-load");
  if (!args.html.empty() && (args.program || !args.what_if.empty()))
    fail(Exit::usage, "--html is of the step of one plan, or of --search. Fix: leave out {}",
         args.program ? "--program" : "--what-if");
  for (const auto& [option, value] :
       {std::pair("--profile", &args.profile), std::pair("--trainer", &args.trainer)})
    if (!value->empty() && args.program)
      fail(Exit::usage, "{} changes the estimate of a plan. Fix: leave out --program", option);
  if (!args.what_if.empty() && (layouts || args.buffers))
    fail(Exit::usage, "--what-if compares plans. Fix: leave out {}", layouts ? "--search" : "--buffers");
  if (args.expert_load && !layouts)
    fail(Exit::usage,
         "--expert-load changes the times of --search only. Fix: add --search N, or leave it out");
  if (!layouts && (args.within > 0 || !args.fixed.empty() || args.objective != "time"))
    fail(Exit::usage, "{} is about layouts of --search. Fix: add --search N, or leave it out",
         args.within > 0       ? "--within"
         : !args.fixed.empty() ? "--fixed"
                               : "--objective");
}

int what_if(const PlanArgs& args, const planner::PlanRequest& request, planner::PlannedRun& run) {
  const int code = report(run.result);
  std::vector<planner::Variant> variants;
  variants.push_back(planner::variant_of("as configured", run));
  for (const std::string& keys : args.what_if) variants.push_back(planner::variant_of(request, keys));
  if (!args.json.empty()) {
    std::vector<JsonValue> others;
    for (size_t i = 1; i < variants.size(); ++i)
      others.push_back(JsonValue::object(
          {{"keys", variants[i].name},
           {"plan", variants[i].json},
           {"refused", variants[i].refused.empty() ? JsonValue() : JsonValue(variants[i].refused)}}));
    write_json(args.json, JsonValue::object({{"schema", 1},
                                             {"plan", variants.front().json},
                                             {"what_if", JsonValue(std::move(others))}}));
  }
  if (args.json != "-") log::info("{}", planner::table(variants));
  return code;
}

int run_plan(const PlanArgs& args) {
  if (comm::launched_with_peers())
    fail(Exit::usage, "plan is one process. Fix: start it without a launcher, for N ranks with --world N");
  check_options(args);
  std::vector<std::string> overrides = args.config.overrides;
  overrides.insert(overrides.end(), args.fixed.begin(), args.fixed.end());
  const planner::PlanRequest request = request_of(args, std::move(overrides));
  planner::PlannedRun run = planner::prepare(request, args.search > 0);
  const ConfigResult& result = run.result;
  if (args.search > 0) return result.ok() ? search(args, run) : report(result);
  if (!run.complete) return report(result);
  if (!args.what_if.empty()) return what_if(args, request, run);
  const int code = report(result);  // a run that is too large is shown as well
  if (args.program) {
    planner::print_program(result, args.world, run.batch, *args.program, run.device);
    return code;
  }
  planner::EstimatedStages stages;
  // The rates of a CPU are measured, which takes its cores.
  auto estimated = std::async(run.gpu ? std::launch::async | std::launch::deferred : std::launch::deferred,
                              [&] { return planner::estimate_run(run, &stages); });
  const planner::RankPlans plans = planner::plan_all(result, args.world, run.batch, run.device, run.gpu);
  const planner::RunEstimate estimate = estimated.get();
  for (const auto& [wanted, option] :
       {std::pair(!args.trace.empty(), "--trace"), std::pair(!args.html.empty(), "--html"),
        std::pair(args.diagram, "--diagram")})
    if (wanted && !estimate.unknown.empty())
      fail(Exit::usage, "{} needs an estimate: {}", option, estimate.unknown);
  if (args.json != "-") {
    planner::print_plan(result, args.world, run.batch, run.device, run.gpu, plans, args.buffers);
    log::info("{}", planner::text_of(estimate));
    if (args.diagram)
      log::info("{}", planner::pipeline_text(predict::step_timeline(
                          *stages.stages, stages.stages->microbatches(), predict::Detail::none)));
  }
  if (!args.json.empty()) write_json(args.json, planner::json_of(run, plans, estimate));
  std::vector<const plan::RunPlan*> of_stages;
  if (stages.stages) of_stages = plans.by_stage(stages.stages->layout().stages);
  if (!args.html.empty()) {
    write_page(args.html, args, estimate, *stages.stages, {}, of_stages);
    if (args.json != "-") log::info("wrote    {}", args.html);
  }
  if (!args.trace.empty()) {
    const size_t events = planner::write_step_trace(args.trace, *stages.stages, of_stages);
    if (args.json != "-")
      log::info("wrote    {}: {} events, for ui.perfetto.dev", args.trace,
                grouped(static_cast<int64_t>(events)));
  }
  return code;
}

}  // namespace

void add_plan(CommandLine& line) {
  const auto args = std::make_shared<PlanArgs>();
  CLI::App* c = line.add(
      "plan", "Print batch arithmetic, grid and memory of a run without running it",
      "  nrl-train plan configs/gpt2-124m.yaml --world 8\n"
      "  nrl-train plan configs/gpt2-124m.yaml --device h100 --buffers\n"
      "  nrl-train plan configs/gpt2-124m.yaml --world 8 --device h100 --search 5\n"
      "  nrl-train plan configs/gpt2-124m.yaml --world 8 --device h100 --trace trace.json --html plan.html");
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
                "Show the N layouts of the ranks that are estimated to be the fastest (default 10)")
      ->type_name("N")
      ->expected(0, 1)
      ->default_str("10")
      ->check([](const std::string& text) {
        return CLI::Range(1, 1000)(text).empty()
                   ? std::string()
                   : fmt::format(
                         "'{}' is not a number of layouts from 1 to 1000. Fix: name the "
                         "configuration before --search, or write --search 10",
                         text);
      });
  c->add_option("--what-if", args->what_if,
                "Compare with the plan of other keys: KEY=VALUE, or several in quotes; device=NAME and "
                "trainer=NAME are these options; may be given again")
      ->type_name("KEYS")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  c->add_option("--json", args->json,
                "Write the plan, its estimate, --what-if or the layouts of --search as JSON to FILE; -: to "
                "standard output, instead of the text")
      ->type_name("FILE");
  c->add_option(
       "--profile", args->profile,
       "Estimate with the rates that nrl-train bench calibrate has measured, or that describe hardware "
       "which --device does not know")
      ->type_name("FILE");
  c->add_option("--trainer", args->trainer,
                "Estimate with the kernels of another trainer in place of ours: " + machine::trainer_names() +
                    "; NAME+PROPERTY+...: " + machine::trainer_properties())
      ->type_name("NAME");
  c->add_option("--trace", args->trace,
                "Write the predicted step as trace events (JSON) for ui.perfetto.dev to FILE")
      ->type_name("FILE");
  c->add_option("--html", args->html,
                "Draw the predicted step and the layouts of --search on a self-contained page in FILE")
      ->type_name("FILE");
  c->add_flag("--diagram", args->diagram, "Print the passes of the pipeline's stages over time");
  c->add_option("--expert-load", args->expert_load,
                "--search: rows that the experts of the busiest rank get, over those of a balanced router "
                "(default 1)")
      ->check(CLI::Range(1.0, 1e6));
  c->add_option("--within", args->within,
                "--search: show also all layouts that take at most P percent longer than the first")
      ->type_name("P")
      ->check(CLI::Range(0.1, 1000.0));
  c->add_option("--fixed", args->fixed, "--search: a key that all layouts must have with this value")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
  c->add_option(
       "--objective", args->objective,
       "--search: what the layouts need least of: time, cost (of cluster.cost) or energy (default time)")
      ->check(CLI::IsMember({"time", "cost", "energy"}));
  line.on(c, [args] { return run_plan(*args); });
}

}  // namespace nrl::app
