#include "apps/bench/steps.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <utility>

#include "apps/model/decoder.h"
#include "apps/monitor/timers.h"
#include "apps/plan/batch.h"
#include "apps/plan/loss.h"
#include "apps/train/launch/launch.h"
#include "apps/train/start/initial_state.h"
#include "apps/train/start/run_data.h"
#include "core/base/sample.h"
#include "core/base/text.h"
#include "core/device/cpu/features.h"
#include "core/device/cpu/memory.h"
#include "core/ops/pair_loss.h"
#include "core/trace/trace.h"

namespace nrl::bench {

RandomBatches::RandomBatches(const plan::RunPlan& plan)
    : vocab_size_(static_cast<uint64_t>(plan.spec.vocab_size)) {
  const int64_t tokens = plan.microbatch_tokens();
  batch_.tokens.resize(static_cast<size_t>(tokens));
  batch_.targets.resize(static_cast<size_t>(tokens));
  const plan::BatchShape& shape = plan.tensors->shape();
  batch_.columns.resize(shape.columns.size());
  if (plan.decoder->options().loss.divergence)
    add_teacher(shape.columns.front().width);
  else if (!shape.columns.empty())
    add_policy(plan);
  const int64_t longest = shape.packed;
  if (longest == 0) return;
  for (int64_t i = 0; i < tokens; ++i) {
    if (i % longest == 0) batch_.bounds.push_back(static_cast<int32_t>(i));
    batch_.positions.push_back(static_cast<int32_t>(i % longest));
  }
  batch_.bounds.push_back(static_cast<int32_t>(tokens));
  if (shape.sequence_values > 0) add_sequences(plan);
}

// plan::PolicyColumn of rollouts of the policy itself, one in two of them a success.
void RandomBatches::add_policy(const plan::RunPlan& plan) {
  using Column = plan::PolicyColumn;
  const auto log_prob = static_cast<float>(-std::log(static_cast<double>(vocab_size_)));
  float values[Column::count] = {};
  values[Column::normalizer] = 1 / static_cast<float>(plan.batch.tokens_per_step);
  values[Column::old] = values[Column::reference] = log_prob;
  values[Column::importance] = 1;
  const auto longest = static_cast<size_t>(plan.tensors->shape().longest());
  for (size_t i = 0; i < batch_.tokens.size(); ++i) {
    values[Column::advantage] = i / longest % 2 == 0 ? 1.0f : -1.0f;
    for (size_t c = 0; c < Column::count; ++c) batch_.columns[c].push_back(std::bit_cast<int32_t>(values[c]));
  }
}

// model::TeacherColumn: distinct tokens, all alike.
void RandomBatches::add_teacher(int64_t topk) {
  const auto log_prob = std::bit_cast<int32_t>(static_cast<float>(-std::log(static_cast<double>(topk + 1))));
  for (size_t i = 0; i < batch_.tokens.size(); ++i)
    for (int64_t k = 0; k < topk; ++k) {
      batch_.columns[model::TeacherColumn::ids].push_back(
          static_cast<int32_t>((i + static_cast<size_t>(k)) % vocab_size_));
      batch_.columns[model::TeacherColumn::log_probs].push_back(log_prob);
    }
}

// ops::PairValue of pairs, or the tokens of a policy's sequences.
void RandomBatches::add_sequences(const plan::RunPlan& plan) {
  std::vector<int32_t>& bounds = batch_.bounds;
  const bool pairs = plan.tensors->shape().sequence_values == ops::PairValue::count;
  const bool odd = bounds.size() % 2 == 0;  // a bound more than sequences
  if (pairs && odd) bounds.insert(bounds.end() - 1, (bounds.end()[-2] + bounds.back()) / 2);
  batch_.sequences = std::ssize(bounds) - 1;
  for (size_t s = 0; s + 1 < bounds.size(); ++s) {
    const auto tokens = static_cast<double>(bounds[s + 1] - bounds[s]);
    if (!pairs) {
      batch_.sequence_values.push_back(tokens);
      continue;
    }
    double values[ops::PairValue::count] = {};
    values[ops::PairValue::normalizer] = 1 / static_cast<double>(plan.batch.global);
    values[ops::PairValue::tokens] = tokens;
    values[ops::PairValue::reference] = -tokens * std::log(static_cast<double>(vocab_size_));
    batch_.sequence_values.insert(batch_.sequence_values.end(), std::begin(values), std::end(values));
  }
}

const data::HostMicroBatch& RandomBatches::next() {
  for (std::vector<int32_t>* ids : {&batch_.tokens, &batch_.targets})
    for (size_t i = 0; i < ids->size(); i += 4) {
      const PhiloxBlock four = stream_.block(block_++);
      for (size_t k = 0; k < std::min<size_t>(4, ids->size() - i); ++k)
        (*ids)[i + k] = static_cast<int32_t>(four[k] % vocab_size_);
    }
  return batch_;
}

std::vector<Step> run_steps(nrl::comm::World& world, monitor::StartPhases& phases, engine::Engine& engine,
                            const train::LrSchedule& schedule, int64_t count, bool eager,
                            const std::function<void()>& before) {
  const plan::RunPlan& plan = engine.plan();
  RandomBatches batches(plan);
  const float share = static_cast<float>(plan.batch.micro) / static_cast<float>(plan.batch.global);
  std::vector<Step> steps;
  double last_result = monitor::Timers::steady_seconds();
  for (int64_t made = 1; made <= count; ++made) {
    if (before) before();
    const trace::TagScope tag({.step = static_cast<int32_t>(made)});
    for (int64_t m = 0; m < plan.batch.accumulation; ++m) {
      const trace::Range range("data", trace::Kind::data);
      engine.fill(m, batches.next(), m * plan.batch.micro, share);
    }
    engine.step({.number = made,
                 .learning_rate = learning_rate(schedule, made),
                 .loss_tokens = plan.batch.tokens_per_step,
                 .eager = eager},
                engine.objective());
    const int64_t leave = made < count ? engine.steps_ahead() : 0;
    while (static_cast<int64_t>(steps.size()) < made - leave) {
      Step s;
      s.lr = learning_rate(schedule, static_cast<int64_t>(steps.size()) + 1);
      s.result = train::collect_step(world, engine);
      phases.end();
      const double now = monitor::Timers::steady_seconds();
      s.ms = (now - std::exchange(last_result, now)) * 1e3;
      s.time = monitor::wall_seconds();
      steps.push_back(s);
    }
  }
  return steps;
}

std::string machine_of(const train::Placement& placement, const nrl::comm::World& world) {
  const ops::Exec& exec = placement.exec();
  return fmt::format("{}, {} of {}", exec.device ? exec.device->properties().name : cpu::processor_name(),
                     counted(placement.host_threads(), "thread"), counted(world.size(), "rank"));
}

double median_ms(const std::vector<Step>& steps, size_t warmup) {
  std::vector<double> ms;
  for (size_t i = warmup; i < steps.size(); ++i) ms.push_back(steps[i].ms);
  return median(std::move(ms));
}

CopySpeed::CopySpeed(const std::vector<Step>& of, size_t warmup) {
  for (size_t i = warmup; i < of.size(); ++i, ++steps) sum += of[i].result.copies;
}

std::string CopySpeed::text() const {
  const auto count = static_cast<double>(steps);
  std::string out;
  for (const auto& [d, where] : {std::pair{sum.to_host, "to the host"}, {sum.from_host, "back"}}) {
    const double bytes = static_cast<double>(d.bytes);
    out += fmt::format("{:.3f} GB {}", bytes / count * 1e-9, where);
    if (d.seconds > 0) out += fmt::format(" at {:.1f} GB/s", bytes / d.seconds * 1e-9);
    out += ", ";
  }
  if (sum.seconds() == 0) return out + "not timed in a CUDA graph";
  return out + fmt::format("{:.2f} ms of copies, {:.2f} ms exposed ({:.1f} % hidden)",
                           sum.seconds() / count * 1e3, sum.exposed_seconds / count * 1e3,
                           100 * sum.hidden());
}

JsonValue CopySpeed::json() const {
  const auto count = static_cast<double>(steps);
  JsonValue out = JsonValue::object({{"to_host_bytes", static_cast<double>(sum.to_host.bytes) / count},
                                     {"from_host_bytes", static_cast<double>(sum.from_host.bytes) / count}});
  if (sum.seconds() == 0) return out;
  out.set("to_host_ms", sum.to_host.seconds / count * 1e3);
  out.set("from_host_ms", sum.from_host.seconds / count * 1e3);
  out.set("exposed_ms", sum.exposed_seconds / count * 1e3);
  out.set("hidden", sum.hidden());
  return out;
}

Trial time_steps(nrl::comm::World& world, const train::Placement& placement, const ConfigResult& config,
                 const std::function<std::unique_ptr<plan::RunPlan>()>& make_plan, int64_t timed) {
  const ops::Exec& exec = placement.exec();
  cpu::release_free_heap();
  const size_t free_before = exec.device ? exec.device->free_memory() : 0;
  std::unique_ptr<engine::Engine> engine;
  monitor::StartPhases phases;
  train::run_collectively(world, [&] {
    engine = std::make_unique<engine::Engine>(make_plan(), engine::training_options(config.config),
                                              placement.groups(), exec);
    train::load_initial_weights(
        config.config, *engine, train::verify_none, placement.host_threads(), phases,
        [&] { engine->require_kernels(engine->objective(), exec.device ? "the GPU" : "the CPU"); });
  });
  const int64_t count = trial_warmup + timed;
  const std::vector<Step> steps =
      run_steps(world, phases, *engine,
                train::make_lr_schedule(config.config.policy, count, engine->plan().batch.global), count);
  engine->finish_gathers();
  double most[] = {median_ms(steps, trial_warmup),
                   exec.device ? static_cast<double>(free_before - exec.device->free_memory())
                               : static_cast<double>(cpu::resident_bytes())};
  world.comm().all_reduce(std::span(most), nrl::comm::Reduce::max);
  return {.step_ms = most[0], .used_bytes = most[1], .copies = {steps, trial_warmup}};
}

std::vector<std::string> random_token_overrides(int64_t steps) {
  std::vector<std::string> out = train::random_token_overrides();
  out.insert(out.end(), {fmt::format("loop.max_num_steps={}", steps), "loop.max_num_epochs=null",
                         "data.reset_position_ids=false", "data.reset_attention_mask=false",
                         "data.eod_mask_loss=false"});
  return out;
}

std::vector<std::string> trial_overrides(std::vector<std::string> given, int64_t steps) {
  static constexpr std::string_view unused[] = {"policy.scheduler"};
  for (std::string& ours : default_overrides(unused)) given.push_back(std::move(ours));
  given.push_back("policy.scheduler.lr_decay_style=constant");
  for (std::string& ours : random_token_overrides(steps)) given.push_back(std::move(ours));
  return given;
}

}  // namespace nrl::bench
