#include "apps/bench/overhead.h"

#include <algorithm>
#include <deque>
#include <fstream>
#include <memory>
#include <utility>
#include <vector>

#include "apps/monitor/start_phases.h"
#include "apps/monitor/terminal.h"
#include "apps/monitor/timers.h"
#include "apps/train/launch/launch.h"
#include "apps/train/loop/reference.h"
#include "apps/train/loop/run_report.h"
#include "apps/train/loop/step_source.h"
#include "apps/train/start/run_config.h"
#include "apps/train/start/run_data.h"
#include "apps/train/start/run_setup.h"
#include "core/base/log.h"
#include "core/base/sample.h"
#include "core/base/text.h"
#include "core/io/json.h"
#include "core/io/scratch_directory.h"

namespace nrl::bench {
namespace {

constexpr int default_pairs = 40, default_block = 10;
constexpr double allowed = 0.005;
constexpr int arms = 2;  // without and with

/// A directory of this run alone, removed at its end. Rank 0 makes it; all ranks know its name.
class OwnDirectory {
 public:
  explicit OwnDirectory(comm::World& world) {
    train::run_collectively(world, [&] {
      if (world.rank() != 0) return;
      directory_ = std::make_unique<ScratchDirectory>(scratch_parent(), "nrl-overhead-");
      path_ = directory_->path();
    });
    world.comm().broadcast_text(path_, 0);
  }
  const std::string& path() const { return path_; }

 private:
  std::unique_ptr<ScratchDirectory> directory_;  // rank 0
  std::string path_;
};

std::vector<std::string> without_monitoring(const Args& args, const std::string& directory, int64_t steps) {
  static constexpr std::string_view off[] = {"checkpointing",
                                             "profiling",
                                             "logger",
                                             "logger.tensorboard",
                                             "logger.wandb",
                                             "logger.mlflow",
                                             "logger.gpu_monitoring",
                                             "monitoring",
                                             "monitoring.alerting",
                                             "monitoring.alerting.thresholds",
                                             "monitoring.analysis",
                                             "monitoring.visualization"};
  std::vector<std::string> out = args.overrides;
  for (std::string& ours : default_overrides(off)) out.push_back(std::move(ours));
  for (std::string& ours : train::steps_only_overrides(steps)) out.push_back(std::move(ours));
  out.push_back("logger.log_dir=" + directory);
  return out;
}

/// Telemetry, alerts and files work once a second, more often than by default.
std::vector<std::string> with_monitoring(std::vector<std::string> out, const std::string& directory) {
  out.insert(
      out.end(),
      {"logger.tensorboard_enabled=true", "logger.wandb_enabled=true", "logger.mlflow_enabled=true",
       "logger.monitor_gpus=true", "logger.gpu_monitoring.collection_interval=1",
       "logger.gpu_monitoring.flush_interval=1", "monitoring.interval=1", "monitoring.alerting.enabled=true",
       "monitoring.analysis.trend_analysis=true", "monitoring.analysis.anomaly_detection=true",
       "monitoring.visualization.prometheus=true", "monitoring.visualization.dashboard=true",
       "monitoring.visualization.port=0", "monitoring.visualization.textfile=" + directory + "/run.prom"});
  return out;
}

/// Processor time of the threads of this process whose number satisfies `counts`.
template <class Counts>
double thread_seconds(const Counts& counts) {
  double sum = 0;
  for (const std::string& thread : list_directory("/proc/self/task")) {
    double nanoseconds = 0;
    std::ifstream("/proc/self/task/" + thread + "/schedstat") >> nanoseconds;
    if (counts(thread)) sum += 1e-9 * nanoseconds;
  }
  return sum;
}

/// Processor time of the threads of the control plane (parallel/control).
double control_seconds() {
  return thread_seconds([](const std::string& thread) {
    std::string name;
    std::ifstream("/proc/self/task/" + thread + "/comm") >> name;
    return name == "nrl-control" || name == "nrl-helper";
  });
}

/// Seconds in which an operation of a group is recorded.
double seconds_of_record() {
  comm::CollectiveLog log;
  const uint32_t group = log.add_group("world", "world[0]");
  constexpr int operations = 50000;
  const double begin = monitor::Timers::steady_seconds();
  for (int i = 0; i < operations; ++i) {
    comm::LogTicket ticket =
        log.enqueue(group, static_cast<uint64_t>(i), comm::Op::all_reduce, DType::f32, 4, -1);
    log.start(ticket);
    log.finish(ticket, false);
    log.expose(ticket, 1);
  }
  return (monitor::Timers::steady_seconds() - begin) / operations;
}

int64_t operations_of(comm::World& world) {
  const std::vector<comm::LogEntry> last = world.collective_log().latest(1);
  return last.empty() ? 0 : static_cast<int64_t>(last.front().id);
}

struct Block {
  double seconds = 0, report = 0;  ///< of all its steps
  double threads = 0;              ///< processor time of monitoring's threads in these steps
  double start = 0, end = 0;       ///< opening and closing everything
};

/// Blocks of steps of one run, each with a report of its own.
class Blocks {
 public:
  Blocks(train::Run& run, const ConfigResult& with)
      : run_(run),
        with_(with),
        source_(train::training_source(run.config, run.train, run.plan(), run.placement.groups(), 0,
                                       run.max_steps())) {}

  Block time(bool on, int64_t steps) {
    using monitor::Timers;
    Block out;
    run_.world.comm().barrier();
    const double opened = Timers::steady_seconds();
    const std::vector<std::string> before_it = list_directory("/proc/self/task");
    const auto is_new = [&](const std::string& thread) {
      return std::find(before_it.begin(), before_it.end(), thread) == before_it.end();
    };
    monitor::TerminalOptions silent;
    silent.active = false;
    monitor::Terminal terminal(silent);
    monitor::StartPhases phases;
    // A start in the future: the report then never measures the machine's peak between steps.
    auto report = std::make_unique<train::RunReport>(run_, terminal, phases, opened + 1e6,
                                                     on ? &with_.config : nullptr);
    report->first_step();
    const double begin = Timers::steady_seconds();
    out.start = begin - opened;
    for (int64_t made = 1; made <= steps; ++made) {
      enqueue(*report);
      const int64_t leave = made < steps ? run_.engine->steps_ahead() : 0;
      while (static_cast<int64_t>(in_flight_.size()) > leave) {
        const engine::StepResult result = train::collect_step(run_.world, *run_.engine);
        const double before = Timers::steady_seconds();
        report->step(in_flight_.front(), result);
        out.report += Timers::steady_seconds() - before;
        in_flight_.pop_front();
      }
    }
    run_.engine->finish_gathers();
    out.seconds = Timers::steady_seconds() - begin;
    out.threads = thread_seconds(is_new);
    const double closes = Timers::steady_seconds();
    report.reset();  // writes what waits
    out.end = Timers::steady_seconds() - closes;
    double most[] = {out.seconds, out.report, out.threads, out.start, out.end};
    run_.world.comm().all_reduce(std::span(most), comm::Reduce::max);
    return {most[0], most[1], most[2], most[3], most[4]};
  }

 private:
  void enqueue(train::RunReport& report) {
    engine::Engine& engine = *run_.engine;
    if (in_flight_.empty()) report.restart_step_clock();
    const double exposed = report.exposed_seconds();
    const train::FilledStep filled = train::fill_step(engine, *source_);
    train::Position& at = run_.position;
    train::StepInFlight step;
    step.step = ++at.step;
    step.lr = 1e-6;
    step.totals = filled.totals;
    step.keys = filled.keys;
    engine.step({.number = step.step,
                 .learning_rate = step.lr,
                 .loss_tokens = std::max<int64_t>(step.totals.loss_tokens, 1),
                 .asks = {.gather = report.wants_gathering()}},
                engine.objective());
    at.tokens += step.totals.tokens;
    step.tokens_so_far = at.tokens;
    step.exposed = report.exposed_seconds() - exposed;
    in_flight_.push_back(step);
  }

  train::Run& run_;
  const ConfigResult& with_;
  std::unique_ptr<train::StepSource> source_;
  std::deque<train::StepInFlight> in_flight_;
};

}  // namespace

int overhead(comm::World& world, const Args& args) {
  const int64_t pairs = args.quick ? 2 : args.pairs.value_or(default_pairs),
                block = args.quick ? 1 : args.steps.value_or(default_block);
  const OwnDirectory own(world);
  const int64_t steps = (pairs + 1) * arms * block;  // with a pair that warms up
  const std::vector<std::string> off = without_monitoring(args, own.path(), steps);
  const ConfigResult without = train::load_config_collectively(world, args.config, off),
                     with = train::load_config_collectively(world, args.config,
                                                            with_monitoring(off, own.path()));
  monitor::StartPhases phases;
  const std::unique_ptr<train::Run> run = train::set_up_run(world, without, phases);
  train::prepare_references(*run, phases);
  Blocks blocks(*run, with);
  std::vector<double> step[arms], report[arms], start[arms], end[arms], threads[arms];
  const double began = monitor::Timers::steady_seconds(), control_before = control_seconds();
  const int64_t operations_before = operations_of(world);
  for (int64_t pair = 0; pair <= pairs; ++pair)
    for (int turn = 0; turn < arms; ++turn) {
      const int arm = (turn + static_cast<int>(pair)) % arms;  // A B, B A, A B, ...
      const Block b = blocks.time(arm == 1, block);
      if (pair == 0) continue;
      const auto count = static_cast<double>(block);
      step[arm].push_back(b.seconds / count * 1e3);
      report[arm].push_back(b.report / count * 1e3);
      start[arm].push_back(b.start * 1e3);
      end[arm].push_back(b.end * 1e3);
      threads[arm].push_back(b.threads / b.seconds);
    }
  // Fractions of a core: steps that occupy all cores lose them.
  double watching[] = {(control_seconds() - control_before) / (monitor::Timers::steady_seconds() - began),
                       static_cast<double>(operations_of(world) - operations_before) /
                           static_cast<double>((pairs + 1) * arms * block)};
  world.comm().all_reduce(std::span(watching), comm::Reduce::max);
  const double record = seconds_of_record(), recording = watching[1] * record * 1e3 / median(step[0]);
  const Interval ratio = paired_ratio_interval(step[0], step[1]);
  std::vector<double> ratios;
  for (size_t i = 0; i < step[0].size(); ++i) ratios.push_back(step[1][i] / step[0][i]);
  const double cost = median(ratios) - 1, reports = median(report[1]);
  if (world.rank() != 0) return 0;
  log::info(
      "blocks    {} pairs of {} steps, without and with TensorBoard, W&B, MLflow, telemetry, alerts and live "
      "views, once a second",
      pairs, block);
  log::info("step      {:.4g} ms without, {:.4g} ms with: {:+.2f} % [{:+.2f}, {:+.2f}], at most {:.1f} %: {}",
            median(step[0]), median(step[1]), 100 * cost, 100 * (ratio.low - 1), 100 * (ratio.high - 1),
            100 * allowed,
            ratio.high - 1 <= allowed  ? "held"
            : ratio.low - 1 <= allowed ? "unclear; more --pairs on a quiet machine"
                                       : "not held");
  log::info("report    {:.3f} ms of a step without, {:.3f} ms with ({:.3f} % of it)", median(report[0]),
            reports, 100 * reports / median(step[1]));
  log::info("threads   {:.3f} % of a core without, {:.3f} % with, beside the steps", 100 * median(threads[0]),
            100 * median(threads[1]));
  log::info("once      start {:.1f} ms without, {:.1f} ms with; end {:.1f} ms without, {:.1f} ms with",
            median(start[0]), median(start[1]), median(end[0]), median(end[1]));
  log::info(
      "watching  control plane {:.3f} % of a core; record of {:.0f} operations a step, {:.0f} ns each: "
      "{:.4f} % of it",
      100 * watching[0], watching[1], record * 1e9, 100 * recording);
  if (!args.json.empty()) {
    const JsonValue json = JsonValue::object({{"benchmark", "overhead"},
                                              {"pairs", pairs},
                                              {"steps", block},
                                              {"without_ms", median(step[0])},
                                              {"with_ms", median(step[1])},
                                              {"cost", cost},
                                              {"low", ratio.low - 1},
                                              {"high", ratio.high - 1},
                                              {"report_without_ms", median(report[0])},
                                              {"report_ms", reports},
                                              {"start_without_ms", median(start[0])},
                                              {"start_ms", median(start[1])},
                                              {"end_without_ms", median(end[0])},
                                              {"end_ms", median(end[1])},
                                              {"threads_without", median(threads[0])},
                                              {"threads", median(threads[1])},
                                              {"control", watching[0]},
                                              {"recorder", recording}});
    write_file_atomic(args.json, json.dump(2) + "\n");
  }
  return 0;
}

}  // namespace nrl::bench
