#include "apps/train/trainer.h"

#include <cmath>
#include <deque>
#include <optional>
#include <utility>

#include "apps/data/loader.h"
#include "apps/train/banner.h"
#include "apps/train/run_io/lr_schedule.h"
#include "apps/train/run_io/metrics.h"
#include "apps/train/run_io/start_phases.h"
#include "apps/train/run_io/statistics.h"
#include "apps/train/run_io/stop_signal.h"
#include "apps/train/run_io/terminal.h"
#include "apps/train/session.h"
#include "apps/train/text_samples.h"
#include "core/base/log.h"
#include "core/base/text.h"
#include "core/ops/coverage.h"
#include "core/ops/kernel_table.h"
#include "core/ops/linear/peak.h"
#include "core/ops/transfer.h"
#include "core/trace/device_timeline.h"
#include "core/trace/trace.h"

namespace nrl::train {
namespace {

LrSchedule make_schedule(const PolicyConfig& policy, int64_t max_steps, int64_t global_batch) {
  const SchedulerConfig& s = policy.scheduler;
  LrSchedule out;
  out.decay = lr_decay_from(name_of(s.lr_decay_style));
  const auto scaled = [&](double lr) {
    return scaled_lr(lr, lr_scaling_from(name_of(policy.optimizer.lr_scaling.rule)), global_batch,
                     policy.optimizer.lr_scaling.base_batch_size);
  };
  out.lr = scaled(policy.optimizer.lr);
  out.min_lr = scaled(s.min_lr);
  out.decay_steps = decay_end(s, max_steps);
  out.warmup_steps =
      s.warmup_ratio
          ? static_cast<int64_t>(std::llround(*s.warmup_ratio * static_cast<double>(out.decay_steps)))
          : s.lr_warmup_iters;
  out.wsd_decay_steps = s.lr_wsd_decay_iters.value_or(0);
  check(out);
  return out;
}

// What the host knows of a step before its results are back.
struct StepUnderWay {
  int64_t step = 0;
  double lr = 0;
  SectionTimes times;
  double exposed = 0;
  int64_t loss_tokens = 0;  // of all ranks
  double keys = 0;          // that a token of this rank sees on average
};

class Trainer {
 public:
  Trainer(comm::World& world, const ConfigResult& config)
      : start_(Timers::steady_seconds()),
        world_(world),
        terminal_(terminal_options(config.config)),
        phases_([this](std::string_view phase, double seconds) {
          terminal_.note(fmt::format("starting: {} ({:.0f} s so far)", phase, seconds));
        }),
        session_(world, config, [this](std::string phase) { begin_phase(std::move(phase)); }),
        c_(session_.config()),
        plan_(session_.plan()) {
    together(world, [&] {
      if (session_.max_steps() > 0)
        schedule_ = make_schedule(c_.policy, session_.max_steps(), plan_.batch.global);
      if (c_.logger.sample_period > 0 && first()) samples_ = std::make_unique<TextSamples>(session_);
      metrics_ = std::make_unique<MetricsLog>(c_.logger.log_dir, session_.position().step, first());
      if (first())
        write_file_atomic(join_path(c_.logger.log_dir, "config.yaml"),
                          dump_resolved(session_.config_result()));
    });
    phases_.end();
    terminal_.set_max_steps(session_.max_steps());
    if (session_.exec().device) {
      peak_ = PeakEstimate(session_.peak());
    } else {
      peak_ = PeakEstimate(session_.peak(), [threads = session_.exec().threads] {
        return ops::measure_gemm_peak(threads, 0.02) * 1e9;
      });
    }
  }

  Exit run() {
    stop::handle_in_steps();
    if (c_.profiling.enabled) profiled_ = parse_step_range(c_.profiling.steps);
    record(trace::Mode::totals);
    if (first()) {
      terminal_.banner(describe_run(session_, peak_.flops()));
      for (const std::string& w : session_.warnings()) terminal_.warn(w);
      // A length given in steps was compared when the configuration was read.
      if (session_.max_steps() != c_.pretrain.max_num_steps.value_or(0))
        if (const std::string text = schedule_beyond_run(c_, session_.max_steps()); !text.empty())
          terminal_.warn(text);
    }
    Position& at = session_.position();
    first_step_ = at.step;
    first_updates_ = at.updates;
    if (session_.max_steps() == 0) {
      save();
      return finish("done: the initial checkpoint was written", Exit::ok);
    }
    if (at.step >= session_.max_steps())
      return finish(
          fmt::format("nothing to do: the checkpoint is at step {} of {}", at.step, session_.max_steps()),
          Exit::ok);
    if (c_.pretrain.val_at_start && at.step == 0) evaluate();

    data::LoaderOptions loading;
    loading.micro_batch = plan_.batch.micro;
    loading.data_parallel_rank = session_.dp().rank();
    loading.data_parallel_size = session_.dp().size();
    loading.accumulation = plan_.batch.accumulation;
    loading.consumed_samples = at.consumed_samples;
    loading.steps = session_.max_steps() - at.step;
    loading.threads = static_cast<int>(c_.data.num_workers);
    loading.prefetch = static_cast<int>(c_.data.prefetch_batches);
    data::BatchLoader loader(session_.train_data(), loading);

    while (at.step < session_.max_steps()) {
      if (profiled_ && at.step + 1 == profiled_->first) record(trace::Mode::timeline);
      if (at.step == first_step_) begin_phase("computing the first step");
      begin_step(loader, loading);
      const bool last = at.step == session_.max_steps();
      const bool recorded =
          profiled_ && at.step >= profiled_->first && (at.step + 1 == profiled_->end || last);
      const bool evaluates = (c_.pretrain.val_period > 0 && at.step % c_.pretrain.val_period == 0) ||
                             (last && c_.pretrain.val_at_end);
      const bool saves =
          last || (c_.checkpointing.save_period > 0 && at.step % c_.checkpointing.save_period == 0);
      const bool samples = c_.logger.sample_period > 0 && (last || at.step % c_.logger.sample_period == 0);
      // A GPU works on this step while the host prepares the next one; the results come one step late, except
      // where the host has to look at the weights.
      const bool looks = evaluates || saves || recorded || samples;
      if (const auto code = finish_steps(session_.exec().device && !looks ? 1 : 0)) return *code;
      if (recorded) write_trace();
      if (evaluates) evaluate();
      if (samples) sample_text();
      if (saves) save();
    }
    return finish(fmt::format("done: {} steps", at.step), Exit::ok);
  }

 private:
  bool first() const { return world_.rank() == 0; }

  TerminalOptions terminal_options(const Config& config) const {
    TerminalOptions options;
    options.active = first();
    options.progress = progress_from(name_of(config.logger.progress));
    options.log_interval = config.logger.log_interval;
    return options;
  }

  void begin_phase(std::string phase) {
    if (first()) phases_.begin(std::move(phase));
  }

  // On a GPU every range costs two events in the stream, so that ranges are timed in profiled steps only.
  void record(trace::Mode mode) {
    ops::Exec& e = session_.exec();
    if (e.device && mode != trace::Mode::timeline) {
      trace::detach_device();
      mode = trace::Mode::off;
    }
    trace::start(mode);
    if (e.device && mode == trace::Mode::timeline) trace::attach_device(*e.device, e.stream);
    gemm_seconds_ = attention_seconds_ = 0;
  }

  std::vector<trace::Total> kernel_totals() {
    return session_.exec().device ? trace::device_totals() : trace::totals();
  }

  void write_trace() {
    const std::string path = join_path(c_.logger.log_dir, fmt::format("trace-rank-{}.json", world_.rank()));
    trace::write_chrome_trace(path, world_.rank());
    terminal_.event("trace", session_.position().step, path);
    profiled_.reset();
    record(trace::Mode::totals);
  }

  // Reads the data of a step and starts all its work.
  void begin_step(data::BatchLoader& loader, const data::LoaderOptions& loading) {
    Position& at = session_.position();
    if (under_way_.empty()) mark_ = Timers::steady_seconds();
    const auto compute = timers_.time(RunSection::compute);
    const SectionTimes before = timers_.times();
    const double exposed_before = exposed_seconds();
    plan::BatchCounts counts;
    {
      const auto scope = timers_.time(RunSection::data);
      for (int64_t m = 0; m < plan_.batch.accumulation; ++m) {
        const int64_t first = data::first_sample(loading, 0, m) - loading.consumed_samples;
        const data::MicroBatch& batch = loader.next();
        plan_.tensors->fill(m, batch, first);
        counts = counts + plan::count(batch, plan_.spec.window);
      }
    }
    StepUnderWay step;
    step.step = at.step + 1;
    step.loss_tokens = loss_tokens_of_all(session_.train_data(), counts);
    step.keys = counts.pairs / static_cast<double>(counts.tokens);
    plan_.tensors->commit(step.step, step.loss_tokens);
    step.lr = learning_rate(schedule_, at.step + 1);
    session_.scalars().begin(step.lr, stop::requested() != 0);
    if (c_.policy.cuda_graph)
      run_graph();
    else
      run_actions();
    session_.scalars().finish();
    ++at.step;
    at.consumed_samples += plan_.batch.global;
    at.tokens += plan_.batch.global * plan_.sequence_length;
    step.times = timers_.times() - before;
    step.exposed = exposed_seconds() - exposed_before;
    under_way_.push_back(step);
  }

  // Tokens with a loss in the global batch, one at least.
  int64_t loss_tokens_of_all(const data::TokenDataset& data, const plan::BatchCounts& mine) {
    if (!data.documents().eod_mask_loss) return plan_.batch.global * plan_.sequence_length;
    auto sum = static_cast<double>(mine.loss_tokens);
    session_.dp().all_reduce(std::span(&sum, 1));
    return std::max<int64_t>(static_cast<int64_t>(sum), 1);
  }

  // The work of one step, enqueued (on a CPU: done). Nothing here waits for the device or depends on the
  // step's number, so that it can be recorded.
  void run_actions() {
    ops::Exec& e = session_.exec();
    const model::StepHooks hooks{
        .scored =
            [&](int) {
              const Tensor sum = session_.flat().scalars.rows(ops::StepScalar::log_prob_sum, 1);
              ops::add_sum(e, {plan_.decoder->log_prob(), sum});
            },
        .finish_reduce = [&] { session_.reducer().finish(); },
        .step =
            [&] {
              session_.optimizer().step(session_.device_dp());
              const Tensor& weights = session_.flat().weights;
              session_.reducer().gather_params(comm::View(weights.data, weights.numel(), weights.dtype));
            },
    };
    session_.reducer().start();
    plan_.decoder->train(plan_.tensors->microbatches(), hooks);
  }

  // The first steps run as they are: libraries choose their kernels then, and load them.
  void run_graph() {
    constexpr int64_t eager_steps = 2;
    ops::Exec& e = session_.exec();
    if (session_.position().step < first_step_ + eager_steps) {
      run_actions();
      return;
    }
    if (!graph_) {
      e.device->begin_capture(e.stream);
      run_actions();
      graph_ = device::Graph(*e.device, e.device->end_capture(e.stream));
    }
    graph_.launch(e.stream);
  }

  // Takes the results of steps under way until only `leave` are left; an exit code when the run ends here.
  std::optional<Exit> finish_steps(int leave) {
    Position& at = session_.position();
    bool diverged = false, stop = false;
    while (static_cast<int>(under_way_.size()) > leave) {
      StepResult result;
      {
        const auto compute = timers_.time(RunSection::compute);
        result = session_.scalars().collect();
        trace::collect_device();
      }
      session_.device_dp().check();  // what went wrong in the background, also while graphs are replayed
      const StepUnderWay step = under_way_.front();
      under_way_.pop_front();
      if (diverged) {  // the device made no update any more
        --at.step;
        at.consumed_samples -= plan_.batch.global;
        at.tokens -= plan_.batch.global * plan_.sequence_length;
        continue;
      }
      at.updates = result.updates;
      at.skipped_in_a_row = result.skipped_in_a_row;
      at.skipped += result.skipped ? 1 : 0;
      report(step, result);
      diverged = at.skipped_in_a_row >= c_.pretrain.max_nonfinite_steps ||
                 (result.skipped && c_.pretrain.on_nonfinite == OnNonfinite::stop);
      stop = stop || result.stop;
      if (diverged || stop) leave = 0;
    }
    if (diverged) {
      if (first())
        log::error_text(fmt::format(
            "non-finite gradients in {} consecutive steps (last: {}); the weights are from step {}. {}. "
            "Fix: lower policy.optimizer.lr, or look at the data of these steps with: nrl-train data show",
            at.skipped_in_a_row, at.step, at.step - at.skipped_in_a_row, blame_for_divergence()));
      return finish("diverged", Exit::diverged);
    }
    // A run that is at its end ends as it would have.
    if (!stop || at.step >= session_.max_steps()) return std::nullopt;
    terminal_.note(fmt::format("stop requested; finished step {}, saving", at.step));
    if (c_.checkpointing.enabled) save();
    return finish(fmt::format("stopped after {}/{} steps, {}; exit 75  (resume: run the same command)",
                              at.step, session_.max_steps(),
                              c_.checkpointing.enabled ? "checkpoint saved"
                                                       : "no checkpoint: checkpointing.enabled is false"),
                  Exit::stopped);
  }

  // Whether the weights that this process started from can be at fault.
  std::string blame_for_divergence() {
    const std::string loaded = !session_.resumed_from().empty() ? session_.resumed_from()
                               : c_.policy.model_name           ? *c_.policy.model_name
                                                                : "";
    const std::string weights = loaded.empty() ? "the initial weights" : "the weights loaded from " + loaded;
    const int64_t good = session_.position().updates - first_updates_;
    if (good == 0)
      return fmt::format("No step has succeeded with {}: they are finite, but were already bad", weights);
    return fmt::format("{} step{} succeeded since {}, which were good", good, good == 1 ? "" : "s", weights);
  }

  // Other ranges hold kernels within them.
  bool is_kernel(std::string_view name) {
    for (const ops::KernelEntry& entry : ops::kernel_entries(*session_.exec().kernels))
      if (entry.name == name) return true;
    return false;
  }

  // Seconds in the kernels whose names begin so, since the start.
  static double kernel_seconds(const std::vector<trace::Total>& totals, std::string_view prefix) {
    double sum = 0;
    for (const trace::Total& total : totals)
      if (total.name.starts_with(prefix)) sum += total.seconds;
    return sum;
  }

  double exposed_seconds() {
    double sum = 0;
    for (const auto& total : world_.ledger().totals()) sum += total.exposed_seconds;
    return sum;
  }

  void report(const StepUnderWay& step, const StepResult& result) {
    const int64_t tokens = plan_.batch.global * plan_.sequence_length;
    const double now = Timers::steady_seconds(), seconds = now - std::exchange(mark_, now);
    phases_.end();
    timers_.move(RunSection::compute, RunSection::comm, step.exposed);
    StepFacts facts;
    facts.step = step.step;
    facts.max_steps = session_.max_steps();
    facts.loss = -result.log_prob_sum / static_cast<double>(step.loss_tokens);
    facts.lr = step.lr;
    facts.grad_norm = result.grad_norm;
    facts.tokens = session_.position().tokens - (session_.position().step - step.step) * tokens;
    facts.tokens_per_s = static_cast<double>(tokens) / seconds;
    // Only rank 0 shows it; the others wait for it in the next step.
    if (first()) peak_.add_step(rank_flops(facts.tokens_per_s, step.keys), now - start_);
    facts.mfu = mfu(facts.tokens_per_s, step.keys);
    if (first())
      facts.mem_bytes = session_.exec().device ? plan_.memory.total_bytes()
                                               : static_cast<int64_t>(cpu::peak_resident_bytes());
    facts.step_ms = seconds * 1e3;
    facts.data_ms = step.times[RunSection::data] * 1e3;
    facts.comm_ms = step.exposed * 1e3;
    const auto kernels = kernel_totals();
    const double gemm = kernel_seconds(kernels, "linear"), attention = kernel_seconds(kernels, "attention");
    facts.gemm_ms = (gemm - gemm_seconds_) * 1e3;
    facts.attention_ms = (attention - attention_seconds_) * 1e3;
    gemm_seconds_ = gemm;
    attention_seconds_ = attention;
    facts.skipped = result.skipped;
    facts.world_size = world_.size();
    // The first step of a process pays for page faults and kernel generation.
    if (step.step > first_step_ + 1) {
      rates_.add(facts.tokens_per_s);
      step_seconds_.add(seconds);
      mean_keys_ += (step.keys - mean_keys_) / static_cast<double>(rates_.count());
      facts.eta_s = step_seconds_.mean() * static_cast<double>(session_.max_steps() - step.step);
    }
    for (int i = 0; i < memory::category_count; ++i) {
      const auto category = static_cast<memory::Category>(i);
      facts.memory.emplace_back(memory::name_of(category), plan_.memory.bytes(category));
    }
    log_row([&] { metrics_->step(facts); });
    terminal_.step(facts);
    if (step.step == first_step_ + 1 && first())
      terminal_.event("start", step.step,
                      fmt::format("first step done {:.2f} s after start", Timers::steady_seconds() - start_));
    if (Timers::steady_seconds() - last_heartbeat_ > 10) {
      session_.heartbeat();
      last_heartbeat_ = Timers::steady_seconds();
    }
  }

  // `keys`: that a token sees on average.
  double rank_flops(double tokens_per_s, double keys) const {
    return tokens_per_s * training_flops_of_token(plan_.spec, keys) / world_.size();
  }

  std::optional<double> mfu(double tokens_per_s, double keys) const {
    if (peak_.flops() <= 0) return std::nullopt;
    return rank_flops(tokens_per_s, keys) / peak_.flops();
  }

  // A row that cannot be written ends the log, not the run.
  template <class Write>
  void log_row(const Write& write) {
    try {
      write();
    } catch (const Error& e) {
      terminal_.warn(e.what());
    }
  }

  // Evaluations and samples run the kernels of steps; their time belongs to no step.
  void skip_kernel_times() {
    const auto kernels = kernel_totals();
    gemm_seconds_ = kernel_seconds(kernels, "linear");
    attention_seconds_ = kernel_seconds(kernels, "attention");
  }

  void sample_text() {
    if (!samples_) return;
    const std::string text = samples_->sample();
    const int64_t step = session_.position().step;
    log_row([&] { metrics_->append(JsonValue::object({{"step", step}, {"text", printable(text)}})); });
    terminal_.event("text", step, clipped(text, 1000));
    skip_kernel_times();
  }

  void evaluate() {
    const auto scope = timers_.time(RunSection::eval);
    const double begin = Timers::steady_seconds();
    data::LoaderOptions loading;
    loading.micro_batch = plan_.batch.micro;
    loading.data_parallel_rank = session_.dp().rank();
    loading.data_parallel_size = session_.dp().size();
    loading.accumulation = plan_.batch.accumulation;
    loading.steps = session_.validation_batches();
    loading.threads = static_cast<int>(c_.data.num_workers);
    data::BatchLoader loader(*session_.validation_data(), loading);
    double sums[2] = {};  // log-probabilities, tokens with a loss
    ops::Exec& e = session_.exec();
    const Tensor& total = session_.evaluation();
    ops::upload(e, total, &sums[0]);
    plan::BatchCounts counts;
    for (int64_t i = 0; i < loading.steps * loading.accumulation; ++i) {
      const data::MicroBatch& batch = loader.next();
      plan_.tensors->fill(0, batch, 0);
      plan_.tensors->commit(0, 0);
      counts = counts + plan::count(batch, plan_.spec.window);
      plan_.decoder->evaluate(plan_.tensors->microbatches().front());
      ops::add_sum(e, {plan_.decoder->log_prob(), total});
    }
    ops::download(e, total, &sums[0]);
    sums[1] = static_cast<double>(counts.loss_tokens);
    session_.dp().all_reduce(std::span(sums));
    const double loss = -sums[0] / std::max(sums[1], 1.0);
    Position& at = session_.position();
    if (std::isfinite(loss) && (at.best_val_loss == 0 || loss < at.best_val_loss)) {
      at.best_val_loss = loss;
      at.best_val_step = at.step;
    }
    EvalFacts facts;
    facts.step = at.step;
    facts.losses = {{"val_loss", loss}};
    facts.seconds = Timers::steady_seconds() - begin;
    log_row([&] { metrics_->eval(facts); });
    terminal_.eval(facts);
    skip_kernel_times();
  }

  void save() {
    if (!c_.checkpointing.enabled) return;
    const auto scope = timers_.time(RunSection::checkpoint);
    const double begin = Timers::steady_seconds();
    try {
      checkpoint_ = session_.save();
      terminal_.event("ckpt", session_.position().step,
                      fmt::format("{}  {:.1f}s", checkpoint_, Timers::steady_seconds() - begin));
      failed_saves_ = 0;
    } catch (const Error& e) {
      // The same on all ranks. Training is worth more than one checkpoint, but not than all of them.
      if (++failed_saves_ >= 3 || session_.position().step == session_.max_steps() || stop::requested())
        throw;
      if (first())
        terminal_.warn(fmt::format("checkpoint at step {} failed: {}; training goes on",
                                   session_.position().step, e.what()));
    }
  }

  Exit finish(std::string outcome, Exit code) {
    const Position& at = session_.position();
    RunSummary s;
    s.outcome = std::move(outcome);
    s.steps = at.step - first_step_;
    s.max_steps = session_.max_steps();
    s.tokens = s.steps * plan_.batch.global * plan_.sequence_length;
    s.wall_s = Timers::steady_seconds() - start_;
    s.mean_tokens_per_s = rates_.mean();
    s.median_tokens_per_s = rates_.median();
    if (rates_.count() > 0) s.mfu = mfu(rates_.median(), mean_keys_);
    if (at.best_val_loss != 0) {
      s.best_val_loss = at.best_val_loss;
      s.best_val_step = at.best_val_step;
    }
    s.times = timers_.times();
    for (const trace::Total& total : kernel_totals())
      if (is_kernel(total.name)) s.kernels.emplace_back(total.name, total.seconds);
    s.checkpoint = checkpoint_;
    if (!checkpoint_.empty() && code == Exit::ok)
      s.next = {fmt::format("nrl-train generate {} --prompt \"...\"", checkpoint_)};
    terminal_.summary(s);
    trace::detach_device();
    stop::work_is_done(static_cast<int>(code));
    return code;
  }

  double start_;
  comm::World& world_;
  Terminal terminal_;
  StartPhases phases_;
  Session session_;
  const Config& c_;
  plan::RunPlan& plan_;
  LrSchedule schedule_;
  std::unique_ptr<MetricsLog> metrics_;
  std::unique_ptr<TextSamples> samples_;  // of rank 0, when asked for
  Timers timers_;
  Histogram rates_, step_seconds_;
  double mean_keys_ = 0;  // of the steps in rates_
  PeakEstimate peak_;
  std::string checkpoint_;
  std::deque<StepUnderWay> under_way_;
  device::Graph graph_;
  std::optional<StepRange> profiled_;
  double mark_ = 0;  // when the result of the step before came, or the first one under way began
  int64_t first_step_ = 0, first_updates_ = 0;
  int failed_saves_ = 0;
  double last_heartbeat_ = 0, gemm_seconds_ = 0, attention_seconds_ = 0;
};

}  // namespace

Exit train(comm::World& world, const ConfigResult& config) {
  Trainer trainer(world, config);
  return trainer.run();
}

}  // namespace nrl::train
