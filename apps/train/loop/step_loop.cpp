#include "apps/train/loop/step_loop.h"

#include <algorithm>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "apps/train/launch/faults.h"
#include "apps/train/launch/launch.h"
#include "apps/train/launch/run_control.h"
#include "apps/train/launch/run_records.h"
#include "apps/train/launch/stop_signal.h"
#include "apps/train/loop/evaluator.h"
#include "apps/train/loop/nan_search.h"
#include "apps/train/start/initial_state.h"
#include "core/base/log.h"
#include "core/base/status.h"
#include "core/base/text.h"
#include "core/io/checkpoint_store.h"
#include "core/trace/device_timeline.h"
#include "core/trace/trace.h"

namespace nrl::train {
namespace {

constexpr int failed_saves_to_end = 3;  // in a row
constexpr double slow_save_wait = 0.1;  // seconds

// The launcher ends the other ranks by signals once it has seen a rank die: that is no request.
bool stops() {
  const RunControl* control = RunControl::current();
  return stop::requested() != 0 && !(control && control->failing());
}

}  // namespace

StepLoop::StepLoop(Run& run, RunReport& report, TextSamples* samples)
    : run_(run),
      report_(report),
      samples_(samples),
      requests_(run.config, run.world.rank() == 0),
      first_step_(run.position.step),
      first_updates_(run.position.updates) {
  if (run.max_steps() > 0)
    schedule_ = make_lr_schedule(run.config.policy, run.max_steps(), run.plan().batch.global);
  if (run.config.reliability.stragglers && run.world.size() > 1)
    stragglers_.emplace(run, [this](const std::string& text) {
      if (run_.world.rank() == 0)
        report_.warn("straggler", text, monitor::AlertLevel::warning);
      else
        log::warn("{}", text);
    });
  const MonitoringConfig& m = run.config.monitoring;
  if (m.enabled && m.stability.on_instability != OnInstability::off)
    stability_.emplace(m.stability, m.alerting.thresholds.loss_increase);
  if (run.config.logger.layer_stats_period > 0 && run.max_steps() > 0) layer_statistics_.emplace(*run.engine);
  if (run.config.reliability.replica_check_period > 0 && run.world.size() > 1) {
    replicas_.emplace(run);
    if (!replicas_->has_replicas()) replicas_.reset();
  }
}

Exit StepLoop::run() {
  const Config& c = run_.config;
  const LoopConfig& loop = resolved_loop(c);
  Position& at = run_.position;
  const int64_t max_steps = run_.max_steps();
  report_.banner();
  if (!replicas_ && c.reliability.replica_check_period > 0 &&
      run_.config_result.given("reliability.replica_check_period"))
    report_.note("no rank has a replica in this layout: reliability.replica_check_period does nothing");
  if (max_steps == 0) {
    save();
    return finish("done: saved the initial checkpoint", Exit::ok);
  }
  if (at.step >= max_steps)
    return finish(fmt::format("nothing to do: the checkpoint is at step {} of {}", at.step, max_steps),
                  Exit::ok);
  auto source = open_source();
  if (loop.val_at_start && at.step == 0) evaluate();
  report_.first_step();
  const NanCheck check = nan_check(c, run_.engine->exec().device != nullptr);
  const bool repeats_bad_steps = check == NanCheck::grads || check == NanCheck::all;
  while (at.step < max_steps) {
    report_.profile().begin_step(at.step + 1);
    enter_epoch();
    const auto due = [&](int64_t period) { return period > 0 && (at.step + 1) % period == 0; };
    const bool last = at.step + 1 == max_steps;
    const bool evaluates = due(loop.val_period) || (last && loop.val_at_end);
    const bool saves = last || due(c.checkpointing.save_period) || save_asked_;
    const bool samples = c.logger.sample_period > 0 && (last || due(c.logger.sample_period));
    const bool looks = layer_statistics_ && due(c.logger.layer_stats_period);
    const bool compares = replicas_ && due(c.reliability.replica_check_period);
    const bool repeats = due(c.reliability.recompute_check_period);
    bool recovered = false;
    const bool traced = report_.profile().ends_with(at.step + 1, evaluates || saves || samples || last);
    {
      const trace::TagScope tag({.step = static_cast<int32_t>(at.step + 1)});
      std::optional<trace::Range> range;
      if (trace::seen()) range.emplace(trace::intern(fmt::format("step_{}", at.step + 1)), trace::Kind::step);
      begin_step(*source);
      // On a GPU results are collected one step late, unless the host needs the weights or the step now.
      const bool now =
          evaluates || saves || traced || samples || looks || compares || repeats || repeats_bad_steps;
      if (const auto code = finish_steps(now ? 0 : run_.engine->steps_ahead())) return *code;
      recovered = unstable_.has_value();
      if (compares) compare_replicas();
      if (repeats) check_repeated(run_, at.step);
    }
    if (traced) report_.profiled(report_.profile().write());
    if (recovered) {
      source.reset();  // reads ahead in data that may be replaced
      if (const auto code = recover()) return *code;
      source = open_source();
      continue;
    }
    if (evaluates) evaluate();
    if (samples && samples_) {
      report_.pause();
      report_.sample(samples_->sample());
    }
    if (saves)
      save();
    else
      end_save(false);
  }
  epoch_range_.reset();
  return finish(fmt::format("done: {} steps", at.step), Exit::ok);
}

// Opens the range of the epoch that the next step begins in.
void StepLoop::enter_epoch() {
  if (run_.train.epoch_samples <= 0) return;
  const int64_t epoch = run_.position.consumed_samples / run_.train.epoch_samples + 1;
  // On a GPU, a range that was opened without a reader is not in the window.
  const bool unseen = run_.engine->exec().device && epoch_seen_ != trace::seen();
  if (epoch == epoch_ && !unseen) return;
  epoch_ = epoch;
  epoch_seen_ = trace::seen();
  epoch_range_.reset();
  epoch_range_.emplace(trace::intern(fmt::format("epoch_{}", epoch)), trace::Kind::phase);
}

std::unique_ptr<StepSource> StepLoop::open_source() {
  if (run_.train.prompts) {
    auto source = std::make_unique<RolloutSource>(run_);
    rollouts_ = source.get();
    for (const std::string& note : source->notes()) report_.note(note);
    return source;
  }
  const Position& at = run_.position;
  return training_source(run_.config, run_.train, run_.plan(), run_.placement.groups(), at.consumed_samples,
                         run_.max_steps() - at.step);
}

engine::StepBounds StepLoop::bounds(const StepSource::Totals& totals) const {
  const bool skips = run_.config.monitoring.stability.on_instability == OnInstability::skip_step;
  if (!stability_ || !skips || !stability_->limits()) return {};
  const monitor::Stability::Limits& limits = *stability_->limits();
  return {.loss_factor = totals.counts().mean(run_.engine->objective().metrics().front(), 1),
          .loss = limits.loss,
          .grad_norm = limits.grad_norm};
}

// Reads the data of a step and enqueues all its work.
void StepLoop::begin_step(StepSource& source) {
  Position& at = run_.position;
  status::page().step = at.step + 1;
  if (in_flight_.empty()) report_.restart_step_clock();
  monitor::Timers& timers = report_.timers();
  const auto compute = timers.time(monitor::RunSection::compute);
  const monitor::SectionTimes before = timers.times();
  const double exposed_before = report_.exposed_seconds();
  StepInFlight step;
  {
    const auto scope = timers.time(monitor::RunSection::data);
    const trace::Range range("data", trace::Kind::data);
    fault::reach(status::Phase::data, at.step + 1);
    const FilledStep filled = fill_step(*run_.engine, source);
    step.totals = filled.totals;
    if (step.totals.generated) report_.profile().skip();  // the kernels of generation
    step.keys = filled.keys;
  }
  step.step = at.step + 1;
  fault::reach(status::Phase::computing, step.step);
  step.lr = learning_rate(schedule_, step.step) * at.lr_factor;
  step.first_sample = at.consumed_samples;
  step.layer_statistics = layer_statistics_ && step.step % run_.config.logger.layer_stats_period == 0;
  std::function<void()> gradients_reduced;
  if (step.layer_statistics) {
    layer_statistics_->begin();
    gradients_reduced = [this] { layer_statistics_->gradients_reduced(); };
  }
  const SaveRequests::Asked asked = requests_.look();
  for (const fault::Fault& f : fault::planted(fault::Site::weight, step.step)) plant(*run_.engine, f);
  const auto faulty_gradient = planter(*run_.engine, fault::planted(fault::Site::gradient, step.step));
  run_.engine->step({.number = step.step,
                     .learning_rate = step.lr,
                     .loss_tokens = std::max<int64_t>(step.totals.loss_tokens, 1),
                     .asks = {.stop = source.complete() && (stops() || run_.saver->lost_lock() || asked.stop),
                              .gather = report_.wants_gathering(),
                              .save = asked.save,
                              .profile = report_.profile().requested()},
                     .bounds = bounds(step.totals),
                     .eager = report_.profile().active() || step.layer_statistics || faulty_gradient,
                     .gradients_reduced = gradients_reduced,
                     .gradient = faulty_gradient},
                    run_.engine->objective());
  if (step.layer_statistics) layer_statistics_->end();
  ++at.step;
  at.consumed_samples += run_.plan().batch.global;
  at.tokens += step.totals.tokens;
  step.tokens_so_far = at.tokens;
  step.times = timers.times() - before;
  step.exposed = report_.exposed_seconds() - exposed_before;
  in_flight_.push_back(step);
}

// Collects the results of steps in flight until only `leave` are left. Returns an exit code if the
// run ends here.
std::optional<Exit> StepLoop::finish_steps(int leave) {
  const LoopConfig& c = resolved_loop(run_.config);
  Position& at = run_.position;
  bool diverges = false, stops = false;
  while (static_cast<int>(in_flight_.size()) > leave) {
    engine::StepResult result;
    {
      const auto compute = report_.timers().time(monitor::RunSection::compute);
      result = collect_step(run_.world, *run_.engine);
      trace::collect_device();
    }
    run_.placement.groups().check();  // replayed graphs report no errors themselves
    StepInFlight step = in_flight_.front();
    in_flight_.pop_front();
    if (diverges) {  // the device skipped this step
      --at.step;
      at.consumed_samples -= run_.plan().batch.global;
      at.tokens -= step.totals.tokens;
      continue;
    }
    status::page().completed = step.step;
    if (stragglers_) {
      stragglers_->look(step.step);
      step.straggler_ratio = stragglers_->ratio();
    }
    at.updates = result.updates;
    at.skipped_in_a_row = result.skipped_in_a_row;
    at.skipped += result.skipped ? 1 : 0;
    at.loss_scale = result.loss_scale;
    at.clean_steps = result.clean_steps;
    {
      const trace::Range range("report", trace::Kind::report);
      std::optional<monitor::LayerTable> layers;
      if (step.layer_statistics) layers = layer_table(result);
      report_.step(step, result, std::move(layers));
      guard(step, result);
    }
    if (result.asked.profile) report_.profile().record_next(at.step + 1);
    diverges = at.skipped_in_a_row >= c.max_nonfinite_steps ||
               (result.skipped && !result.overflow && !result.limited && c.on_nonfinite == OnNonfinite::stop);
    stops = stops || result.asked.stop;
    save_asked_ = save_asked_ || result.asked.save;
    if (diverges || stops || unstable_) leave = 0;
  }
  if (diverges) return diverged();
  // A stop request stays until the first step after the rollback: the run must not be saved in a bad state.
  if (unstable_) return std::nullopt;
  // A stop request after the last step changes nothing.
  return stops && at.step < run_.max_steps() ? stopped() : std::nullopt;
}

monitor::LayerTable StepLoop::layer_table(const engine::StepResult& result) {
  run_.engine->finish_gathers();  // the order of collectives must be the same on all ranks
  std::vector<double> sums = layer_statistics_->sums();
  run_.world.comm().all_reduce(std::span(sums), comm::Reduce::sum);
  return layer_statistics_->table(sums, result.used_loss_scale);
}

void StepLoop::guard(const StepInFlight& step, const engine::StepResult& result) {
  const double loss = run_.engine->objective().loss(result.metrics, step.totals.counts());
  // The steps that follow in the same row have the same weights, and mostly the same cause.
  if (result.skipped && !result.overflow && !result.limited && result.skipped_in_a_row == 1) {
    const NanCheck level = nan_check(run_.config, run_.engine->exec().device != nullptr);
    if (level != NanCheck::off)
      report_.found_nan(step.step, search_nan(run_, level, step.step, loss, result.grad_norm));
  }
  // Other bits in a replica make steps go wrong as bad data does.
  if (replicas_ && result.skipped && !result.overflow && !result.limited && result.skipped_in_a_row == 1)
    replicas_->check(run_.position.step);
  if (!stability_) return;
  if (result.limited) report_.skipped(step, loss, result.grad_norm);
  const bool rolls_back = run_.config.monitoring.stability.on_instability == OnInstability::rollback;
  const std::vector<monitor::Finding> findings =
      stability_->add({.step = step.step,
                       .loss = loss,
                       .grad_norm = result.grad_norm,
                       .skipped = result.skipped && !result.limited,
                       .limited = result.limited});
  if (findings.empty()) return;
  if (replicas_) replicas_->check(run_.position.step);
  for (const monitor::Finding& found : findings) {
    if (rolls_back && !unstable_) unstable_ = found;
    if (run_.world.rank() == 0)
      report_.warn(name_of(found.kind),
                   fmt::format("step {}: {}{}", found.step, found.message,
                               replicas_ ? "; the replicas agree bit for bit" : ""),
                   monitor::AlertLevel::warning);
  }
}

Exit StepLoop::give_up(const std::string& why) {
  if (run_.world.rank() == 0)
    log::error_text(
        fmt::format("instability at step {}: {}; {}{}{}. Fix: lower policy.optimizer.lr, or inspect the data "
                    "of these steps with nrl-train data show",
                    unstable_->step, unstable_->message, why,
                    rollbacks_.empty() ? "" : ". Rollbacks: ", fmt::join(rollbacks_, "; ")));
  return finish("diverged", Exit::diverged);
}

std::optional<Exit> StepLoop::recover() {
  const StabilityConfig& guard = run_.config.monitoring.stability;
  const Position bad = run_.position;
  if (bad.recoveries >= guard.max_recoveries)
    return give_up(fmt::format("the run has gone back {} times (monitoring.stability.max_recoveries: {})",
                               bad.recoveries, guard.max_recoveries));
  end_save(true);
  require_locks();
  report_.pause();
  const auto scope = report_.timers().time(monitor::RunSection::checkpoint);
  std::string path;
  run_collectively(run_.world, [&] {
    if (run_.world.rank() != 0) return;
    for (const CheckpointEntry& entry :
         list_checkpoints(run_.config.checkpointing.checkpoint_dir, Validation::quick))
      if (path.empty() && entry.valid() && entry.step < unstable_->step - guard.window) path = entry.path;
  });
  run_.world.comm().broadcast_text(path, 0);
  if (path.empty())
    return give_up(
        fmt::format("there is no checkpoint that is more than {} steps (monitoring.stability.window) older",
                    guard.window));
  int64_t first_sample = 0;
  roll_back(run_, path, [&](Position& at) {
    first_sample = at.consumed_samples;
    at.recoveries = bad.recoveries + 1;
    at.lr_factor = bad.lr_factor * guard.lr_factor;
    at.tokens = bad.tokens;
    if (guard.skip_data) at.consumed_samples = bad.consumed_samples;
  });
  const monitor::Finding found = *std::exchange(unstable_, std::nullopt);
  const Position& at = run_.position;
  const std::string text = fmt::format(
      "{} since step {}; back to step {}, lr x {:g} ({} of {}), samples {} to {} {}", found.message,
      found.step, at.step, at.lr_factor, at.recoveries, guard.max_recoveries, grouped(first_sample),
      grouped(bad.consumed_samples), guard.skip_data ? "left out" : "again");
  rollbacks_.push_back(fmt::format("from step {} to {}", bad.step, at.step));
  report_.rolled_back(bad.step, first_sample, bad.consumed_samples, text);
  stability_.emplace(guard, run_.config.monitoring.alerting.thresholds.loss_increase);
  epoch_ = 0;
  compared_ = -1;
  return std::nullopt;
}

// What may be too large for the numbers of float16, or for a loss scale that stays.
std::string StepLoop::precision_advice() const {
  std::string advice;
  const auto scaling = resolved_loss_scaling(run_.config.policy);
  if (scaling && !scaling->dynamic && scaling->scale != 1)
    advice = fmt::format("set policy.loss_scaling: dynamic (now {:g}), ", scaling->scale);
  if (run_.engine->plan().recipe.activations() == DType::f16)
    advice += "set policy.precision: bfloat16 (float16 ends at 65504), ";
  return advice;
}

Exit StepLoop::diverged() {
  const Position& at = run_.position;
  if (run_.world.rank() == 0)
    log::error_text(fmt::format(
        "non-finite gradients in {} consecutive steps (last: {}); the weights are from step {}. {}. "
        "Fix: {}lower policy.optimizer.lr, or inspect the data of these steps with nrl-train data show",
        at.skipped_in_a_row, at.step, at.step - at.skipped_in_a_row, report_.divergence_hint(first_updates_),
        precision_advice()));
  return finish("diverged", Exit::diverged);
}

// Collective. Ends the run if another one has taken over a directory that it writes to.
void StepLoop::require_locks() {
  run_.engine->finish_gathers();
  run_collectively(run_.world, [&] { run_.saver->require_locks(); });
}

std::optional<Exit> StepLoop::stopped() {
  require_locks();
  const int64_t step = run_.position.step;
  const bool saves = run_.config.checkpointing.enabled;
  report_.note(fmt::format("stop requested; finished step {}{}", step, saves ? ", saving" : ""));
  save(true);
  const char* saved = saves ? "checkpoint saved" : "no checkpoint: checkpointing.enabled is false";
  return finish(fmt::format("stopped after {}/{} steps, {}; exit 75  (resume: run the same command)", step,
                            run_.max_steps(), saved),
                Exit::stopped);
}

void StepLoop::compare_replicas() {
  if (!replicas_ || compared_ == run_.position.step) return;
  replicas_->check(run_.position.step);
  compared_ = run_.position.step;
}

void StepLoop::evaluate() {
  report_.pause();
  const auto scope = report_.timers().time(monitor::RunSection::eval);
  fault::reach(status::Phase::evaluation, run_.position.step);
  const double begin = monitor::Timers::steady_seconds();
  if (rollouts_) {
    RolloutSource::Evaluation done = rollouts_->validate();
    return report_.evaluation(std::move(done.metrics), done.loss, monitor::Timers::steady_seconds() - begin);
  }
  const std::vector<double> metrics = train::evaluate(run_);
  report_.evaluation(metrics, monitor::Timers::steady_seconds() - begin);
}

void StepLoop::save(bool stopping) {
  if (!run_.config.checkpointing.enabled) return;
  const int64_t step = run_.position.step;
  const bool ends = stopping || step == run_.max_steps();
  end_save(true, !ends);
  if (stopping && saved_step_ == step) return;
  require_locks();
  report_.pause();
  const auto scope = report_.timers().time(monitor::RunSection::checkpoint);
  fault::reach(status::Phase::checkpoint, step);
  const double begin = monitor::Timers::steady_seconds();
  report_.before_checkpoint();
  save_asked_ = false;  // all steps in flight are collected
  compare_replicas();
  run_.position.replicas_agreed = replicas_.has_value();
  // After a failure the ranks must agree at once on how the next save ends.
  const bool beside = run_.saver->async() && failed_saves_ == 0 && !ends;
  try {
    if (beside) {
      run_.saver->start(*run_.engine, run_.position);
      return requests_.saved(0);
    }
    const std::string path = run_.saver->save(*run_.engine, run_.position);
    saved(step, path, monitor::Timers::steady_seconds() - begin);
  } catch (const Error& e) {  // the same on all ranks
    save_failed(step, e, ends);
  }
}

void StepLoop::saved(int64_t step, const std::string& path, double seconds) {
  if (RunRecords* records = RunRecords::current()) records->saved(path);
  report_.checkpoint(step, path, seconds);
  failed_saves_ = 0;
  saved_step_ = step;
  requests_.saved(seconds);
}

// The run ends when it could not save at its end, or several times in a row.
void StepLoop::save_failed(int64_t step, const Error& error, bool ends) {
  requests_.saved(0);
  if (++failed_saves_ >= failed_saves_to_end || ends) throw Error(error.code(), error.what());
  if (run_.world.rank() == 0)
    report_.warn("checkpoint_not_saved",
                 fmt::format("checkpoint at step {} not saved: {}; training continues until {} in a row fail",
                             step, error.what(), failed_saves_to_end));
}

void StepLoop::end_save(bool waits, bool next_is_due) {
  AsyncSaver* const saver = run_.saver->async();
  if (!saver || !saver->in_flight() || (!waits && !saver->done())) return;
  const auto scope = report_.timers().time(monitor::RunSection::checkpoint);
  const double begin = monitor::Timers::steady_seconds();
  const SaveOutcome outcome = saver->join();
  const double waited = monitor::Timers::steady_seconds() - begin;
  if (outcome.error)
    save_failed(outcome.step, *outcome.error, false);
  else
    saved(outcome.step, outcome.path, outcome.seconds);
  if (!next_is_due || waited < slow_save_wait || std::exchange(warned_of_slow_saves_, true) ||
      run_.world.rank() != 0)
    return;
  report_.warn(
      "slow_checkpoints",
      fmt::format(
          "the checkpoint of step {} took {:.1f} s: the next one, of step {}, waited {:.1f} s for it. Fix: "
          "raise checkpointing.save_period and save_seconds, or use a faster directory",
          outcome.step, outcome.seconds, run_.position.step, waited),
      monitor::AlertLevel::warning);
}

Exit StepLoop::finish(std::string outcome, Exit code) {
  end_save(true);
  run_.saver->finish();
  status::enter(status::Phase::finishing);
  run_.engine->finish_gathers();
  report_.summary(std::move(outcome), code);
  stop::set_final_exit_code(static_cast<int>(code));
  return code;
}

}  // namespace nrl::train
