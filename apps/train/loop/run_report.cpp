#include "apps/train/loop/run_report.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "apps/monitor/communication.h"
#include "apps/monitor/failure.h"
#include "apps/monitor/open_sinks.h"
#include "apps/monitor/rows.h"
#include "apps/monitor/settings.h"
#include "apps/train/loop/rollout_source.h"
#include "apps/train/loop/stragglers.h"
#include "apps/train/start/banner.h"
#include "core/base/log.h"
#include "core/base/text.h"
#include "core/device/cpu/memory.h"
#include "core/io/atomic_file.h"
#include "core/ops/peak.h"

namespace nrl::train {
namespace {

constexpr const char *config_file = "config.yaml", *memory_file = "memory.json",
                     *skipped_file = "skipped.jsonl";
/// Written as AtomicFiles, which a killed run leaves under their temporary names.
constexpr const char* own_files[] = {config_file,           memory_file,
                                     skipped_file,          monitor::communication_file,
                                     monitor::metrics_file, monitor::telemetry_file,
                                     monitor::alerts_file,  monitor::target_file,
                                     monitor::run_file,     monitor::summary_file,
                                     monitor::failure_file, monitor::failure_space_file,
                                     samples_file,          stragglers_file};

double directory_bytes(const std::string& path) {
  double sum = 0;
  for (const std::string& name : list_directory(path))
    if (const std::string file = join_path(path, name); !is_directory(file))
      sum += static_cast<double>(File::open_read(file).size());
  return sum;
}

monitor::PeakEstimate peak_estimate(Run& run) {
  if (run.engine->exec().device) return monitor::PeakEstimate(run.peak);
  const double factor = native_factor(run.engine->exec(), run.plan().recipe.activations());
  return monitor::PeakEstimate(run.peak, [threads = run.engine->exec().threads, factor] {
    return ops::measure_gemm_peak(threads, 0.02) * 1e9 * factor;
  });
}

}  // namespace

RunReport::RunReport(Run& run, monitor::Terminal& terminal, monitor::StartPhases& phases, double start,
                     const Config* reported)
    : run_(run),
      reported_(reported ? *reported : run.config),
      terminal_(terminal),
      phases_(phases),
      metrics_(reported_.logger.log_dir, run.position.step, run.world.rank() == 0),
      profile_(run),
      peak_(peak_estimate(run)),
      memory_(reported_.monitoring,
              run.engine->exec().device ? run.plan().memory.bytes(memory::Tier::pinned) +
                                              run.plan().memory.bytes(memory::Tier::host)
                                        : run.plan().memory.bytes(memory::Tier::device),
              run.engine->exec().device),
      good_ms_(metrics_.kept_ms()),
      start_(start),
      first_step_(run.position.step),
      first_tokens_(run.position.tokens) {
  begin_session();
  if (first()) {
    const std::string& log_dir = reported_.logger.log_dir;
    remove_leftovers(log_dir, run.saver->locks()->of(log_dir), [](std::string_view name) {
      return std::any_of(std::begin(own_files), std::end(own_files),
                         [&](const char* file) { return has_nonce(name, std::string(file) + ".tmp-"); });
    });
    write_file_atomic(join_path(log_dir, config_file), dump_resolved(run.repeatable));
  }
  terminal_.set_max_steps(run.max_steps());
  const MonitoringConfig& m = run.config.monitoring;
  if (m.enabled && (m.stability.on_instability == OnInstability::skip_step ||
                    m.stability.on_instability == OnInstability::rollback))
    skipped_.emplace(run.config.logger.log_dir, run.position.step, first(), skipped_file);
}

void RunReport::banner() {
  if (!first()) return;
  terminal_.banner(describe_run(run_, peak_.flops()));
  for (const std::string& w : run_.warnings) terminal_.warn(w);
  // For a length in steps, the check of the configuration has already printed this warning.
  if (run_.max_steps() != resolved_loop(run_.config).max_num_steps.value_or(0))
    if (const std::string text = schedule_beyond_run(run_.config, run_.max_steps()); !text.empty())
      terminal_.warn(text);
}

void RunReport::first_step() {
  run_.world.collective_log().reset_totals();
  phases_.begin("first step", "computing the first step");
  live_ = open_live();
}

double RunReport::exposed_seconds() const {
  double sum = 0;
  for (const auto& total : run_.world.collective_log().totals()) sum += total.exposed_seconds;
  return sum;
}

double RunReport::rank_flops(double tokens_per_s, double keys) const {
  return tokens_per_s * training_flops_of_token(run_.plan().spec, keys) / run_.world.size();
}

std::optional<double> RunReport::mfu(double tokens_per_s, double keys) const {
  if (peak_.flops() <= 0) return std::nullopt;
  return rank_flops(tokens_per_s, keys) / peak_.flops();
}

// Reading it takes as long as the rest of a report, so it is read five times a second.
int64_t RunReport::peak_resident(double now) {
  if (now >= next_resident_) {
    resident_ = static_cast<int64_t>(cpu::peak_resident_bytes());
    next_resident_ = now + 0.2;
  }
  return resident_;
}

void RunReport::begin_session() {
  sinks_.emplace();
  if (!first()) return;
  const double now = monitor::wall_seconds();
  monitor::put_failure_aside(reported_.logger.log_dir);
  file_ = monitor::begin_session(reported_.logger.log_dir, run_.position.step, now, supervised_identity());
  open_sinks(now, file_.sessions.size() > 1);
}

void RunReport::open_sinks(double now, bool resumed) {
  const LoggerConfig& logger = reported_.logger;
  if (!logger.tensorboard_enabled && !logger.wandb_enabled && !logger.mlflow_enabled) return;
  const auto warn = [&](const std::string& text) { terminal_.warn(text); };
  const monitor::RunInfo info{.id = file_.run_id,
                              .name = file_.name,
                              .resumed = resumed,
                              .first_step = run_.position.step,
                              .created = file_.created,
                              .time = now,
                              .host = run_.world.hosts().front(),
                              .settings = monitor::given_settings(run_.repeatable)};
  sinks_.reset();  // writes the rows that wait
  sinks_.emplace(monitor::open_sinks(logger, info, warn), warn);
}

void RunReport::end_session(monitor::RunSummary& summary, Exit code) {
  const double now = monitor::wall_seconds();
  const int exit = static_cast<int>(code);
  sinks_->close(run_.position.step, now, exit);
  for (std::string& command : sinks_->next()) summary.next.push_back(std::move(command));
  log_row([&] {
    const std::string& log_dir = reported_.logger.log_dir;
    JsonValue json = JsonValue::object({{"run_id", file_.run_id}, {"time", now}, {"exit", exit}});
    json.set("goodput", goodput(now));
    const JsonValue facts = monitor::summary_row(summary);
    for (const JsonMember& m : facts.members()) json.set(m.key, m.value);
    write_file_atomic(join_path(log_dir, monitor::summary_file), json.dump(2) + "\n");
    monitor::end_session(log_dir, file_, run_.position.step, now, exit);
  });
}

std::unique_ptr<monitor::Live> RunReport::open_live() {
  const comm::World& world = run_.world;
  const int rank = world.rank();
  monitor::Live::Place place{.rank = rank,
                             .node = world.nodes()[rank],
                             .first_of_node = rank == 0 || world.nodes()[rank - 1] != world.nodes()[rank],
                             .host = world.hosts()[rank],
                             .on_gpu = run_.engine->exec().device != nullptr,
                             .step = run_.position.step};
  if (reported_.logger.monitor_gpus && place.on_gpu) {
    const std::vector<std::string> uuids =
        run_.world.comm().gather_texts(run_.engine->exec().device->properties().uuid);
    for (int other = 0; other < world.size(); ++other)
      if (world.nodes()[other] == place.node &&
          std::find(place.gpus.begin(), place.gpus.end(), uuids[other]) == place.gpus.end())
        place.gpus.push_back(uuids[other]);
  }
  return monitor::Live::open(
      reported_, std::move(place),
      {.alert = [&](const monitor::Alert& alert) { terminal_.event("alert", alert.step, alert.message); },
       .note = [&](const std::string& text) { terminal_.note(text); },
       .warn = [&](const std::string& text) { terminal_.warn(text); }});
}

void RunReport::step_live(const monitor::StepFacts& facts, double seconds) {
  if (!live_) return;
  const double waiting = facts.comm_ms * 1e-3;
  live_->work(seconds - waiting, waiting);
  live_->step(facts);
}

void RunReport::gather(const monitor::StepFacts& facts) {
  run_.engine->finish_gathers();  // the order of collectives must be the same on all ranks
  JsonValue own = JsonValue::object(), leaks = JsonValue::array();
  if (live_) own.set("telemetry", live_->contribution(monitor::Timers::steady_seconds()));
  for (const monitor::Leak& leak : std::exchange(leaks_, {}))
    leaks.push_back(JsonValue::object({{"text", leak.text}, {"growth", leak.growth}}));
  own.set("leaks", leaks);
  const std::vector<std::string> texts = run_.world.comm().gather_texts(own.dump());
  if (!first() || !live_) return;
  std::vector<std::string> telemetry;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const JsonValue of_rank = parse_json(texts[rank], "what a rank reports");
    if (of_rank.contains("telemetry")) telemetry.push_back(of_rank.get_string("telemetry"));
    for (const JsonValue& leak : of_rank.at("leaks").items())
      live_->leak(facts.step, static_cast<int>(rank), run_.world.hosts()[rank],
                  {leak.get_string("text"), leak.get_int("growth")});
  }
  live_->gathered(facts.step, facts.time, telemetry);
}

void RunReport::watch_memory(int64_t step) {
  const MonitoringConfig& m = reported_.monitoring;
  for (const monitor::Leak& leak : memory_.after_step(step - first_step_)) {
    if (!first()) {
      log::warn("rank {}: {}", run_.world.rank(), leak.text);
      if (m.enabled && m.alerting.enabled) leaks_.push_back(leak);
      continue;
    }
    terminal_.warn(leak.text);
    if (live_) live_->leak(step, 0, run_.world.hosts().front(), leak);
  }
}

void RunReport::warn(std::string_view rule, const std::string& text, monitor::AlertLevel level) {
  terminal_.warn(text);
  if (live_) live_->event(rule, level, run_.position.step, text);
}

void RunReport::skipped(const StepInFlight& step, double loss, double grad_norm) {
  log_row([&] {
    skipped_->append(JsonValue::object({{"step", step.step},
                                        {"reason", "limit"},
                                        {"loss", loss},
                                        {"grad_norm", grad_norm},
                                        {"first_sample", step.first_sample},
                                        {"end_sample", step.first_sample + run_.plan().batch.global}}));
  });
}

void RunReport::rolled_back(int64_t from, int64_t first_sample, int64_t end_sample, const std::string& text) {
  const std::string& log_dir = run_.config.logger.log_dir;
  const int64_t step = run_.position.step;
  terminal_.event("rollback", from, text);
  if (live_) live_->rolled_back(from, text);
  if (first()) open_sinks(monitor::wall_seconds(), true);
  sinks_->text(step, monitor::wall_seconds(), "rollback", fmt::format("step {}: {}", from, text));
  log_row([&] {
    metrics_ = monitor::MetricsLog(log_dir, step, first());
    good_ms_ = metrics_.kept_ms();
    skipped_.emplace(log_dir, step, first(), skipped_file);
    skipped_->append(JsonValue::object({{"step", step},
                                        {"reason", "rollback"},
                                        {"from", from},
                                        {"lr_factor", run_.position.lr_factor},
                                        {"first_sample", first_sample},
                                        {"end_sample", end_sample}}));
  });
}

void RunReport::found_nan(int64_t step, const std::string& text) {
  terminal_.event("nan", step, text);
  if (live_) live_->event("nan", monitor::AlertLevel::critical, step, text);
}

// If a row cannot be written, the run continues without metrics.
template <class Write>
void RunReport::log_row(const Write& write) {
  try {
    write();
  } catch (const Error& e) {
    terminal_.warn(e.what());
  }
}

void RunReport::step(const StepInFlight& step, const engine::StepResult& result,
                     std::optional<monitor::LayerTable> layers) {
  const int64_t tokens = step.totals.tokens;
  const memory::MemoryPlan& memory = run_.plan().memory;
  const double now = monitor::Timers::steady_seconds(), seconds = now - std::exchange(last_result_, now);
  phases_.end();
  timers_.move(monitor::RunSection::compute, monitor::RunSection::comm, step.exposed);
  monitor::StepFacts facts;
  facts.step = step.step;
  facts.max_steps = run_.max_steps();
  const engine::Objective& objective = run_.engine->objective();
  const engine::LossCounts counts = step.totals.counts();
  facts.loss = objective.loss(result.metrics, counts);
  for (size_t i = 1; i < objective.metrics().size(); ++i)
    if (const engine::MetricSpec& metric = objective.metrics()[i]; !metric.name.empty())
      facts.metrics.push_back({.name = std::string(metric.name),
                               .value = counts.mean(metric, result.metrics[i]),
                               .brief = std::string(metric.brief)});
  facts.metrics.insert(facts.metrics.end(), step.totals.metrics.begin(), step.totals.metrics.end());
  facts.lr = step.lr;
  facts.grad_norm = result.grad_norm;
  if (const model::MoeSpec& moe = run_.plan().spec.moe; moe.experts > 0)
    facts.router = {.aux_loss = moe.has_aux_loss() ? std::optional(result.router[0]) : std::nullopt,
                    .z_loss = result.router[1],
                    .load = result.router[2],
                    .rounds = result.expert_rounds};
  if (run_.train.examples || run_.train.prompts)
    facts.examples = {.loss_tokens = step.totals.loss_tokens,
                      .efficiency = step.totals.efficiency,
                      .imbalance = step.totals.imbalance};
  facts.tokens = step.tokens_so_far;
  facts.tokens_per_s = static_cast<double>(tokens) / seconds;
  // Only rank 0 prints MFU. While it measures the peak, the other ranks wait in their next step.
  // Nor may the measurement be a part of a recorded step.
  if (first() && !profile_.active()) peak_.add_step(rank_flops(facts.tokens_per_s, step.keys), now - start_);
  facts.mfu = mfu(facts.tokens_per_s, step.keys);
  facts.fp8 = plan::fp8_text(run_.config, run_.plan());
  if (first()) facts.mem_bytes = run_.engine->exec().device ? memory.total_bytes() : peak_resident(now);
  facts.step_ms = seconds * 1e3;
  facts.data_ms = step.times[monitor::RunSection::data] * 1e3;
  facts.comm_ms = step.exposed * 1e3;
  const StepProfile::KernelSeconds kernels =
      profile_.end_step(step.step, seconds - step.times[monitor::RunSection::data] - step.exposed);
  facts.gemm_ms = kernels.gemm * 1e3;
  facts.attention_ms = kernels.attention * 1e3;
  if (const memory::HostCopyStatistics& copies = result.copies; copies.bytes() > 0)
    facts.offload = {
        .bytes = copies.bytes(), .ms = copies.seconds() * 1e3, .exposed_ms = copies.exposed_seconds * 1e3};
  facts.layers = std::move(layers);
  facts.straggler_ratio = step.straggler_ratio;
  facts.skipped = result.skipped;
  facts.limited = result.limited;
  if (result.loss_scale > 0) facts.loss_scale = result.used_loss_scale;
  facts.world_size = run_.world.size();
  // The first step of a process includes page faults and kernel generation.
  if (step.step > first_step_ + 1) {
    rates_.add(facts.tokens_per_s);
    step_seconds_.add(seconds);
    mean_keys_ += (step.keys - mean_keys_) / static_cast<double>(rates_.count());
    facts.eta_s = step_seconds_.mean() * static_cast<double>(run_.max_steps() - step.step);
  }
  for (int i = 0; i < memory::category_count; ++i) {
    const auto category = static_cast<memory::Category>(i);
    facts.memory.emplace_back(memory::name_of(category), memory.bytes(category));
  }
  facts.time = monitor::wall_seconds();
  log_row([&] { metrics_.step(facts); });
  if (!facts.skipped) good_ms_ += facts.step_ms;
  if (!sinks_->empty()) {
    monitor::Row row = monitor::sink_row(facts);
    row.values.emplace_back("perf/goodput", goodput(row.time));
    sinks_->row(std::move(row));
  }
  terminal_.step(facts);
  step_live(facts, seconds);
  if (result.asked.gather) gather(facts);
  watch_memory(step.step);
  if (step.step == first_step_ + 1 && first()) {
    constexpr double slow = 5;  // a slow start explains itself
    const double seconds = monitor::Timers::steady_seconds() - start_;
    terminal_.event("start", step.step,
                    fmt::format("first step finished {:.2f} s after start{}", seconds,
                                seconds < slow ? "" : ": " + phases_.text()));
    if (facts.examples)
      terminal_.event(
          "packing", step.step,
          fmt::format("{:.1f} % of the rows of microbatches are used; the busiest rank has {:.1f} % more "
                      "work than the mean",
                      100 * facts.examples->efficiency, 100 * facts.examples->imbalance));
  }
}

void RunReport::evaluation(const std::vector<double>& metrics, double seconds) {
  monitor::EvalFacts facts;
  facts.step = run_.position.step;
  const std::span<const engine::MetricSpec> specs = run_.engine->objective().metrics();
  facts.losses = {{"val_loss", metrics.front()}};
  for (size_t i = 1; i < metrics.size(); ++i)
    if (!specs[i].name.empty())
      facts.metrics.push_back({.name = fmt::format("val_{}", specs[i].name),
                               .value = metrics[i],
                               .brief = std::string(specs[i].brief)});
  report_evaluation(std::move(facts), seconds);
}

void RunReport::evaluation(std::vector<monitor::Metric> metrics, std::optional<double> loss, double seconds) {
  monitor::EvalFacts facts{.step = run_.position.step, .metrics = std::move(metrics)};
  if (loss) facts.losses = {{"val_loss", *loss}};
  report_evaluation(std::move(facts), seconds);
}

void RunReport::report_evaluation(monitor::EvalFacts facts, double seconds) {
  facts.seconds = seconds;
  facts.time = monitor::wall_seconds();
  log_row([&] { metrics_.eval(facts); });
  if (!sinks_->empty()) sinks_->row(monitor::sink_row(facts));
  terminal_.eval(facts);
  if (live_) live_->evaluation(facts);
  profile_.skip();
}

void RunReport::sample(const std::string& text) {
  const int64_t step = run_.position.step;
  log_row([&] { metrics_.append(JsonValue::object({{"step", step}, {"text", printable(text)}})); });
  sinks_->text(step, monitor::wall_seconds(), "sample", printable(text));
  terminal_.event("text", step, clipped(text, 1000));
  profile_.skip();
}

void RunReport::checkpoint(int64_t step, const std::string& path, double seconds) {
  checkpoint_ = path;
  if (live_ && first()) log_row([&] { live_->checkpoint(directory_bytes(path)); });
  terminal_.event("ckpt", step, fmt::format("{}  {:.1f}s", path, seconds));
}

void RunReport::profiled(const StepProfile::Written& written) {
  if (!written.warning.empty()) terminal_.warn(written.warning);
  terminal_.event("profile", run_.position.step, written.directory);
  if (live_ && !written.regression.empty())
    live_->event("performance_regression", monitor::AlertLevel::warning, run_.position.step,
                 written.regression);
}

std::string RunReport::divergence_hint(int64_t first_updates) const {
  const std::string loaded =
      !run_.resumed_from.empty() ? run_.resumed_from : run_.config.policy.model_name.value_or("");
  const std::string weights = loaded.empty() ? "the initial weights" : "the weights loaded from " + loaded;
  const int64_t succeeded = run_.position.updates - first_updates;
  if (succeeded == 0) return fmt::format("No step succeeded with {}: they are finite, but unusable", weights);
  return fmt::format("{} step{} succeeded since {}, so these are not the cause", succeeded,
                     succeeded == 1 ? "" : "s", weights);
}

std::vector<monitor::CommFacts> RunReport::communication() const {
  std::vector<monitor::CommFacts> out;
  for (const comm::LogTotal& t : run_.world.collective_log().totals())
    if (t.ranks > 1)
      out.push_back({.group = t.group,
                     .operation = std::string(name_of(t.op)),
                     .algorithm = std::string(t.algorithm),
                     .ranks = t.ranks,
                     .count = t.count,
                     .bytes = t.bytes,
                     .wire_bytes = t.wire(),
                     .seconds = t.busy_seconds,
                     .exposed_s = t.exposed_seconds});
  std::stable_sort(out.begin(), out.end(), [](const monitor::CommFacts& a, const monitor::CommFacts& b) {
    return a.exposed_s > b.exposed_s;
  });
  return out;
}

void RunReport::write_memory() {
  const std::string own = fmt::format("{} {}", run_.plan().memory.total_bytes(), cpu::peak_resident_bytes());
  JsonValue ranks = JsonValue::array({});
  for (const std::string& text : run_.world.comm().gather_texts(own)) {
    const size_t space = text.find(' ');
    ranks.push_back(JsonValue::object({{"arena_bytes", std::stoll(text.substr(0, space))},
                                       {"peak_resident_bytes", std::stoll(text.substr(space + 1))}}));
  }
  if (!first()) return;
  log_row([&] {
    write_file_atomic(join_path(reported_.logger.log_dir, memory_file),
                      JsonValue::object({{"ranks", ranks}}).dump() + "\n");
  });
}

void RunReport::summary(std::string outcome, Exit code) {
  const Position& at = run_.position;
  monitor::RunSummary s;
  s.outcome = std::move(outcome);
  s.steps = std::max<int64_t>(at.step - first_step_, 0);  // a rollback may go beyond the start
  s.max_steps = run_.max_steps();
  s.tokens = at.tokens - first_tokens_;
  s.wall_s = monitor::Timers::steady_seconds() - start_;
  s.mean_tokens_per_s = rates_.mean();
  s.median_tokens_per_s = rates_.median();
  if (rates_.count() > 0) s.mfu = mfu(rates_.median(), mean_keys_);
  if (at.best_val_loss != 0) {
    s.best_val_loss = at.best_val_loss;
    s.best_val_step = at.best_val_step;
  }
  s.times = timers_.times();
  s.kernels = profile_.kernels();
  s.kernel_base_s = profile_.timed_seconds();
  s.kernel_steps = profile_.timed_steps();
  s.comm = communication();
  if (first() && !s.comm.empty())
    log_row([&] {
      write_file_atomic(join_path(reported_.logger.log_dir, monitor::communication_file),
                        to_json(monitor::Communication{s.steps, s.comm}).dump() + "\n");
    });
  write_memory();
  s.checkpoint = checkpoint_;
  if (!checkpoint_.empty() && code == Exit::ok && run_.plan().spec.head == model::HeadKind::vocabulary)
    s.next = {fmt::format("nrl-train generate {}{} --prompt \"...\"", checkpoint_,
                          run_.train.examples && run_.train.examples->rendered() ? " --chat" : "")};
  if (first()) end_session(s, code);
  terminal_.summary(s);
}

}  // namespace nrl::train
