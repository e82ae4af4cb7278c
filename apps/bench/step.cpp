#include <algorithm>
#include <cmath>
#include <utility>

#include "apps/bench/history.h"
#include "apps/bench/machine.h"
#include "apps/bench/roofline.h"
#include "apps/bench/steps.h"
#include "apps/engine/engine.h"
#include "apps/model/families/hf_config.h"
#include "apps/monitor/timers.h"
#include "apps/predict/estimate_text.h"
#include "apps/state/model_source.h"
#include "apps/train/launch/device_choice.h"
#include "apps/train/launch/launch.h"
#include "apps/train/loop/capture.h"
#include "apps/train/loop/lr_schedule.h"
#include "apps/train/loop/profile_files.h"
#include "apps/train/start/decide.h"
#include "apps/train/start/initial_state.h"
#include "apps/train/start/run_config.h"
#include "core/base/log.h"
#include "core/base/sample.h"
#include "core/base/text.h"
#include "core/device/cpu/features.h"
#include "core/device/dry_run.h"
#include "core/ops/transfer.h"
#include "core/trace/device_timeline.h"

namespace nrl::bench {
namespace {

// Not timed: they include kernel selection and page faults, and the third one captures the CUDA graph.
constexpr int warmup_steps = 4;

/// The device times of the parts of a step: the mean of `count` steps, which are not launched as graphs.
predict::MeasuredStep measure_parts(nrl::comm::World& world, engine::Engine& engine,
                                    const train::LrSchedule& schedule, int64_t count, double step_seconds) {
  trace::start(trace::Mode::totals);
  trace::attach_device(*engine.exec().device, engine.exec().stream);
  monitor::StartPhases started;
  run_steps(world, started, engine, schedule, count, true);
  ops::synchronize(engine.exec());
  trace::collect_device();
  predict::MeasuredStep measured{.step = step_seconds, .parts = trace::device_totals_by_parent()};
  trace::detach_device();
  trace::start(trace::Mode::off);
  for (trace::Total& total : measured.parts) total.seconds /= static_cast<double>(count);
  return measured;
}

/// The fastest of `count` steps, kernel by kernel: others disturbed it least.
Roofline measure_roofline(nrl::comm::World& world, engine::Engine& engine, const train::LrSchedule& schedule,
                          int64_t count) {
  ops::Exec& exec = engine.exec();
  world.comm().barrier();  // all ranks measure at once, as they work
  const plan::Peaks rates = train::measure_peaks(exec);
  ops::KernelTimer timer(exec);
  std::vector<ops::TimedCall> calls;
  double best = 0;
  for (int64_t i = 0; i < count; ++i) {
    monitor::StartPhases started;
    const double seconds = run_steps(world, started, engine, schedule, 1, true).front().ms * 1e-3;
    std::vector<ops::TimedCall> taken = timer.take();
    if (best > 0 && seconds >= best) continue;
    best = seconds;
    calls = std::move(taken);
  }
  return Roofline(rates, calls, best);
}

/// Records `count` steps. Collective. Returns the directory of the window.
std::string record_steps(const train::Recording& of, const train::LrSchedule& schedule, int64_t count,
                         const std::string& log_dir) {
  engine::Engine& engine = of.engine;
  const size_t calls = engine.dry_step(engine.objective(), true).calls.size();
  train::Capture capture(of, 1, count, calls);
  monitor::StartPhases started;
  run_steps(of.world, started, engine, schedule, count, true, [&] { capture.begin_step(); });
  return train::write_profile(of, capture.finish(), log_dir).directory;
}

predict::Prediction predict(engine::Engine& engine, const machine::DeviceModel& gpu) {
  const plan::RunPlan& plan = engine.plan();
  return predict::Prediction(
      gpu, engine.dry_step(engine.objective(), true).calls,
      {.tokens = static_cast<double>(plan.batch.tokens_per_step),
       .flops_per_token = model::training_flops_per_token(plan.spec, plan.sequence_length),
       .planned_bytes = plan.memory.total_bytes()});
}

/// Why a step cannot be measured on that GPU here; empty where it can. A simulated device stands for all of
/// them.
std::string why_not_measured(const Args& args, const machine::DeviceModel& gpu) {
  if (args.device == "cpu") return "--device cpu";
  std::string why_not;
  const train::AcceleratorBackend& backend = train::accelerator_backend();
  if (backend.devices(why_not).empty()) return why_not;
  const device::Properties found = backend.open(0)->properties();
  // The name alone is not enough: an H100 PCIe is slower, a GH200 has an H100.
  const bool same = found.name.find(gpu.product) != std::string::npos &&
                    found.name.find("G" + std::string(gpu.product)) == std::string::npos &&
                    machine::peak_flops(found) == gpu.bf16_flops();
  return found.simulated || same ? "" : fmt::format("this machine has {}", found.name);
}

const char* precision_name(const plan::RunPlan& plan) {
  const DType t = plan.recipe.activations();
  return t == DType::bf16 ? "bfloat16" : t == DType::f16 ? "float16" : "float32";
}

std::string model_line(const plan::RunPlan& plan) {
  return fmt::format("{} parameters, {} x {} tokens per step, {}", grouped(plan.whole().total()),
                     plan.batch.global, plan.sequence_length, precision_name(plan));
}

/// The figures of the timed steps for a file of --history.
std::vector<HistoryEntry> history_of(const Args& args, const std::vector<Step>& steps,
                                     const train::Placement& placement, engine::Engine& engine,
                                     const nrl::comm::World& world, double probe) {
  std::string config = args.config;
  for (const std::string& key : args.overrides) config += " " + key;
  HistoryEntry entry{.metric = "step_ms",
                     .config = config,
                     .machine = machine_of(placement, world),
                     .commit = args.commit.empty() ? std::string(NRL_VERSION) : args.commit,
                     .time = steps.back().time,
                     .value = median_ms(steps, warmup_steps),
                     .interval = {},
                     .probe = probe};
  std::vector<double> ms;
  for (size_t i = warmup_steps; i < steps.size(); ++i) ms.push_back(steps[i].ms);
  // Few steps are resampled in shorter blocks than usual, which would be the whole sample.
  const auto few = static_cast<int64_t>(ms.size()) / 4;
  entry.interval = bootstrap(ms,
                             [](std::span<const double> v) {
                               return median({v.begin(), v.end()});
                             },
                             {.block = ms.size() < 20 ? std::max<int64_t>(few, 1) : 0});
  HistoryEntry planned = entry;
  planned.metric = "planned_bytes";
  planned.value = static_cast<double>(engine.plan().memory.total_bytes());
  planned.interval = {planned.value, planned.value};
  planned.probe = 0;
  return {entry, planned};
}

/// Prints the prediction alone, which needs neither the GPU nor its memory.
int predict_only(nrl::comm::World& world, const Args& args, const ConfigResult& config,
                 const machine::DeviceModel& gpu, const std::string& why_not) {
  const Config& c = config.config;
  const std::unique_ptr<device::Runtime> runtime = device::open_dry_run(gpu.properties());
  ops::LibraryOptions options;
  options.tf32 = c.kernels.tf32;
  const std::unique_ptr<ops::Libraries> libraries = ops::open_dry_run_libraries(gpu.major, options);
  const ops::KernelTable no_kernels;
  ops::Exec exec;
  exec.kernels = &no_kernels;
  exec.reduction_blocks = ops::gpu_partials;
  exec.device = runtime.get();
  exec.multiprocessors = gpu.multiprocessors;
  exec.libraries = libraries.get();
  const plan::GridPosition position = plan::grid_position(c, 1, 0);
  const parallel::Groups ranks(position.grid, world.comm(), plan::needed_groups(c, position, false));
  engine::Engine engine(
      plan::make_run_plan(c, train::load_model_spec(config), resolve_batch(c, 1), position, DeviceType::cuda,
                          train::threads_for(c.kernels, 1), {},
                          train::memory_for_rank(c.kernels, DeviceType::cuda, gpu.for_plan(0))),
      engine::training_options(c), ranks, exec);
  const predict::Prediction prediction = predict(engine, gpu);
  log::info("device      {}: estimated, not measured ({})", gpu.product, why_not);
  log::info("model       {}", model_line(engine.plan()));
  if (const std::string recomputed = plan::recompute_text(engine.plan()); !recomputed.empty())
    log::info("recompute   {}", recomputed);
  for (const ops::LibraryChoice& choice : libraries->choices)
    log::info("{} {}: {}", choice.op, choice.pass, choice.implementation);
  log::info("{}", prediction.text());
  Report report(args, JsonValue());
  report.set("config", args.config);
  report.set("prediction", prediction.json());
  return report.finish();
}

}  // namespace

int step(nrl::comm::World& world, const Args& args, double process_start) {
  const int64_t timed = args.quick ? 2 : args.steps.value_or(default_steps), count = warmup_steps + timed;
  std::vector<std::string> overrides = args.overrides;
  for (const std::string& ours : random_token_overrides(count)) overrides.push_back(ours);
  const machine::DeviceModel* gpu_model =
      args.predict.empty() ? nullptr : &machine::find_device_model("--predict", args.predict);
  if (gpu_model || args.device != "auto")
    overrides.push_back("device=" + (gpu_model ? std::string("cuda") : args.device));
  train::RunSetting setting;
  setting.files = false;  // no data is read
  const ConfigResult config = train::load_config_collectively(world, args.config, overrides, setting);
  if (gpu_model)
    if (const std::string why_not = why_not_measured(args, *gpu_model); !why_not.empty())
      return predict_only(world, args, config, *gpu_model, why_not);
  const Config& c = config.config;
  monitor::StartPhases phases;
  phases.add("configuration", monitor::wall_seconds() - process_start);
  phases.begin("device", "");
  train::Placement placement(world, config);
  const bool gpu = placement.device() == DeviceType::cuda;
  if (gpu && args.roofline)
    fail(Exit::usage, "--roofline measures kernels on a CPU. Fix: add --device cpu, or use --predict");
  if (gpu) {
    phases.add("context", placement.accelerator().context_seconds, "device");
    phases.add("libraries", placement.accelerator().library_seconds, "device");
  }
  phases.begin("plan", "");
  auto made = train::RankDecision(world, config, placement).take();
  phases.begin("memory", "");
  const auto free_memory = [&] { return gpu ? placement.exec().device->free_memory() : 0; };
  const size_t free_before = free_memory();
  engine::Engine engine(std::move(made), engine::training_options(c), placement.groups(), placement.exec());
  int kernels = 0;
  train::load_initial_weights(c, engine, train::verify_all, placement.host_threads(), phases, [&] {
    phases.begin("kernels", "");
    kernels = engine.require_kernels(engine.objective(), gpu ? "the GPU" : "the CPU");
  });
  phases.begin("first step", "");
  const plan::RunPlan& plan = engine.plan();
  const BatchPlan& batch = plan.batch;
  const train::LrSchedule schedule = train::make_lr_schedule(c.policy, count, batch.global);
  const std::vector<Step> steps = run_steps(world, phases, engine, schedule, count);
  // This counts the plan, and what libraries and the driver have allocated for themselves since.
  const size_t used = free_before - std::min(free_before, free_memory());

  const double step_ms = median_ms(steps, warmup_steps), first = steps.front().time - process_start;
  const double tokens = static_cast<double>(batch.tokens_per_step), tokens_per_s = tokens / step_ms * 1e3;
  const double flops = model::training_flops_per_token(plan.spec, plan.sequence_length);
  const double flops_per_s = tokens_per_s * flops / world.size();  // of a rank
  double peak = train::peak_of(placement, plan.recipe.activations());
  const double probe = gpu ? 1 : peak;
  if (!gpu) peak = std::max(peak, flops_per_s);  // a measured peak may be too low
  const double mfu = peak > 0 ? flops_per_s / peak : 0;
  const auto loss = [&](const Step& s) {
    return engine.objective().loss(s.result.metrics,
                                   {.tokens = tokens, .examples = static_cast<double>(batch.global)});
  };
  const char* precision = precision_name(plan);

  Report report(args, describe_device(engine.exec()));
  report.set("config", args.config);
  report.set("sequences", batch.global);
  report.set("micro_batch", batch.micro);
  report.set("length", plan.sequence_length);
  report.set("tokens_per_step", batch.tokens_per_step);
  if (gpu)
    for (const ops::LibraryChoice& choice : engine.exec().libraries->choices) {
      log::info("{} {}: {}", choice.op, choice.pass, choice.implementation);
      report.set(choice.op + " " + choice.pass, choice.implementation);
    }
  report.set("precision", precision);
  report.set("cuda_graph", c.policy.cuda_graph);
  report.set("recompute", plan::recompute_text(plan));
  report.set("timed_steps", timed);
  report.set("step_ms", step_ms);
  report.set("tokens_per_s", tokens_per_s);
  report.set("mfu", mfu > 0 ? JsonValue(mfu) : JsonValue());
  report.set("flops_per_token", flops);
  report.set("planned_bytes", plan.memory.total_bytes());
  if (gpu) report.set("used_bytes", static_cast<int64_t>(used));
  report.set("peak_resident_bytes", cpu::peak_resident_bytes());
  report.set("first_step_s", first);
  JsonValue parts = JsonValue::object({});
  for (const auto& [part, seconds] : phases.parts()) parts.set(part, seconds);
  report.set("start_s", std::move(parts));
  const CopySpeed copies(steps, warmup_steps);
  if (copies) report.set("offload", copies.json());
  report.set("loss_first", loss(steps.front()));
  report.set("loss_last", loss(steps.back()));
  report.set("model", parse_json(model::hugging_face_config(plan.spec, precision), "model"));
  for (size_t i = 0; i < steps.size(); ++i)
    report.add(JsonValue::object({{"step", static_cast<int64_t>(i) + 1},
                                  {"time", steps[i].time},
                                  {"loss", loss(steps[i])},
                                  {"grad_norm", steps[i].result.grad_norm},
                                  {"lr", steps[i].lr},
                                  {"skipped", steps[i].result.skipped},
                                  {"step_ms", steps[i].ms}}));
  log::info("device      {}", placement.describe(kernels));
  log::info("model       {}", model_line(plan));
  if (const std::string recomputed = plan::recompute_text(plan); !recomputed.empty())
    log::info("recompute   {}", recomputed);
  log::info("step        {:.2f} ms (median of {})", step_ms, timed);
  log::info("speed       {} tokens/s{}", grouped(std::llround(tokens_per_s)),
            mfu > 0 ? fmt::format(", mfu {:.1f} %", mfu * 100) : "");
  log::info("memory      {} planned{}", human_bytes(static_cast<uint64_t>(plan.memory.total_bytes())),
            gpu ? fmt::format(", {} of the GPU taken", human_bytes(used))
                : fmt::format(", {} resident", human_bytes(cpu::peak_resident_bytes())));
  if (copies) log::info("offload     {}", copies.text());
  log::info("first step  finished {:.2f} s after exec", first);
  log::info("start       {}", phases.text());
  if (gpu_model) {
    constexpr int64_t profiled_steps = 3;
    predict::Prediction prediction = predict(engine, *gpu_model);
    prediction.add(measure_parts(world, engine, schedule, args.quick ? 1 : profiled_steps, step_ms * 1e-3));
    log::info("{}", prediction.text());
    report.set("prediction", prediction.json());
  }
  if (args.roofline) {
    const Roofline roofline = measure_roofline(world, engine, schedule, timed);
    log::info("{}", roofline.text());
    report.set("roofline", roofline.json());
  }
  if (!args.profile.empty()) {
    const train::Recording of{.world = world, .placement = placement, .engine = engine, .config = config};
    log::info("profile     {}", record_steps(of, schedule, timed, args.profile));
  }
  if (world.rank() != 0) return 0;
  if (!args.history.empty())
    append_history(args.history, history_of(args, steps, placement, engine, world, probe));
  return report.finish();
}

}  // namespace nrl::bench
