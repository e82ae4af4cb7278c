#include "apps/verify/trial.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <span>
#include <utility>

#include "apps/plan/memory_check.h"
#include "apps/train/device_choice.h"
#include "apps/train/initial_state.h"
#include "apps/train/launch.h"
#include "apps/train/model_source.h"
#include "apps/train/report/timers.h"
#include "apps/train/run_data.h"
#include "apps/verify/reference.h"
#include "core/base/text.h"

namespace nrl::verify {

std::string_view name_of(Kind kind) {
  constexpr std::string_view names[] = {"initial weight", "loss", "gradient", "gradient norm", "weight"};
  return names[static_cast<int>(kind)];
}

double Check::severity() const {
  if (!problem.empty() || std::isnan(error)) return std::numeric_limits<double>::infinity();
  return limit > 0 ? error / limit : error > 0 ? std::numeric_limits<double>::infinity() : 0;
}

namespace {

// The microbatches of one step, as the step loop of training reads them.
plan::BatchCounts fill(engine::Engine& engine, data::BatchLoader& loader,
                       const data::LoaderOptions& options) {
  plan::BatchCounts counts;
  for (int64_t m = 0; m < options.accumulation; ++m) {
    const data::HostMicroBatch& batch = loader.next();
    engine.fill(m, batch, data::first_sample(options, 0, m));
    counts = counts + plan::count(batch, engine.plan().spec.window);
  }
  return counts;
}

class Trial {
 public:
  Trial(comm::World& world, const ConfigResult& config, const data::TokenDataset& data, int64_t steps)
      : world_(world), config_(config), data_(data), placement_(world, config), steps_(steps) {}

  TrialResult run() {
    const double begin = train::Timers::steady_seconds();
    set_up();
    compare_weights(Kind::initial, 0);
    engine::LanguageModeling objective;
    data::LoaderOptions loading =
        train::make_loader_options(config_.config, engine_->plan().batch, placement_.grid_position());
    loading.steps = steps_;
    data::BatchLoader loader(data_, loading);
    data::LoaderOptions reference_loading;
    std::unique_ptr<data::BatchLoader> reference_loader;
    if (reference_.engine) {
      const Config alone = reference_config(config_).config;
      reference_loading = train::make_loader_options(alone, reference_.engine->plan().batch,
                                                     plan::grid_position(alone, 1, 0));
      reference_loading.steps = steps_;
      reference_loader = std::make_unique<data::BatchLoader>(data_, reference_loading);
    }
    for (int64_t s = 1; s <= steps_ && ok_; ++s) {
      const int64_t tokens = engine_->plan().batch.tokens_per_step;
      const plan::BatchCounts counts = fill(*engine_, loader, loading);
      engine::StepInput input{.number = s,
                              .learning_rate = learning_rate,
                              .loss_tokens = train::loss_tokens_of_all(
                                  data_, tokens, counts, placement_.groups(), engine_->plan().layout),
                              .eager = true};
      input.gradients_reduced = [&] { compare_gradients(s); };
      engine::StepResult result, expected;
      if (reference_.engine) {
        const plan::BatchCounts all = fill(*reference_.engine, *reference_loader, reference_loading);
        engine::StepInput alone = input;
        alone.loss_tokens = train::loss_tokens_of_all(data_, tokens, all, *reference_.groups, {});
        // The configured step runs inside of the reference's, when both have gradients and neither has
        // updated its weights.
        alone.gradients_reduced = [&] { engine_->step(input, objective); };
        engine::LanguageModeling own;
        reference_.engine->step(alone, own);
        expected = train::collect_step(world_, *reference_.engine);
        reference_tokens_ = static_cast<double>(alone.loss_tokens);
      } else {
        engine_->step(input, objective);
      }
      result = train::collect_step(world_, *engine_);
      compare_scalars(s, result, static_cast<double>(input.loss_tokens), expected);
      compare_weights(Kind::weight, s);
    }
    return finish(train::Timers::steady_seconds() - begin);
  }

 private:
  void set_up() {
    const Config& c = config_.config;
    std::unique_ptr<plan::RunPlan> plan, alone;
    train::run_collectively(world_, [&] {
      const ops::Exec& exec = placement_.exec();
      plan = plan::make_run_plan(c, train::load_model_spec(config_), resolve_batch(c, world_.size()),
                                 placement_.grid_position(), placement_.device(), placement_.host_threads(),
                                 false, placement_.memory());
      if (exec.device) plan::require_memory(config_, *plan, placement_.capacity(), "the GPU");
      if (world_.rank() == 0) alone = make_reference_plan(config_, *plan, placement_, world_.local_size());
    });
    engine::TrainingOptions options = engine::training_options(c);
    options.optimizer.eps = epsilon(plan->whole.total());
    limits_ = limits_for(plan->recipe, placement_.device() == DeviceType::cuda && c.kernels.tf32,
                         c.distributed.grad_reduce_dtype, plan->spec.expert_layers() > 0);
    train::run_collectively(world_, [&] {
      engine_ =
          std::make_unique<engine::Engine>(std::move(plan), options, placement_.groups(), placement_.exec());
      if (alone) reference_ = make_reference(world_, placement_, std::move(alone), options);
    });
    train::run_collectively(world_, [&] { engine_->register_memory(); });
    train::run_collectively(world_, [&] {
      for (engine::Engine* engine : {engine_.get(), reference_.engine.get()}) {
        if (!engine) continue;
        train::StartPhases phases;
        engine::LanguageModeling objective;
        // The ranks of a node share the verification of its copy.
        const train::VerifyShare share{world_.local_rank(), world_.local_size()};
        train::load_initial_weights(c, *engine, engine == engine_.get() ? share : train::verify_none,
                                    placement_.host_threads(), phases, [&] {
                                      engine->require_kernels(
                                          objective,
                                          placement_.device() == DeviceType::cuda ? "the GPU" : "the CPU");
                                    });
      }
    });
  }

  // Keeps the worst of a tensor over all steps.
  void add(Check check) {
    ok_ = ok_ && check.ok();
    Check& worst = checks_.try_emplace({check.kind, check.name}, check).first->second;
    if (check.severity() > worst.severity()) worst = std::move(check);
  }

  void add_tensors(Kind kind, int64_t step, const std::vector<Difference>& differences,
                   const std::vector<double>& errors, double limit) {
    for (size_t i = 0; i < differences.size(); ++i) {
      const Difference& d = differences[i];
      Check check{.kind = kind, .name = d.name, .error = errors[i], .limit = limit, .step = step};
      if (!check.ok()) check.rank = d.rank;
      if (d.counted != d.numel)
        check.problem =
            fmt::format("ranks count {} of its {} elements", grouped(d.counted), grouped(d.numel));
      add(std::move(check));
    }
  }

  std::vector<Difference> compare_held(HeldTensors (*held)(engine::Engine&)) {
    HeldTensors wanted;
    if (reference_.engine) wanted = held(*reference_.engine);
    return compare(world_.comm(), engine_->plan().whole, reference_.engine ? &wanted : nullptr,
                   held(*engine_));
  }

  void compare_gradients(int64_t step) {
    const auto differences = compare_held(held_gradients);
    add_tensors(Kind::gradient, step, differences, gradient_errors(differences), limits_.gradient);
  }

  void compare_weights(Kind kind, int64_t step) {
    const auto differences = compare_held(held_weights);
    tensors_ = differences.size();
    if (kind == Kind::weight)
      return add_tensors(kind, step, differences, weight_errors(differences), limits_.weight);
    std::vector<double> unequal;
    for (const Difference& d : differences) unequal.push_back(static_cast<double>(d.unequal));
    add_tensors(kind, step, differences, unequal, 0);
  }

  // Every rank has these scalars; the one that differs most is compared.
  void compare_scalars(int64_t step, const engine::StepResult& result, double loss_tokens,
                       const engine::StepResult& reference) {
    std::array<double, 2> want{-reference.metrics[0] / reference_tokens_, reference.grad_norm};
    world_.comm().broadcast(comm::View(std::span(want)), 0);
    const std::array got{-result.metrics[0] / loss_tokens, result.grad_norm};
    const std::array kinds{std::pair(Kind::loss, limits_.loss), std::pair(Kind::norm, limits_.norm)};
    std::array<double, 2> errors{};
    for (size_t i = 0; i < got.size(); ++i) errors[i] = std::abs(got[i] - want[i]) / std::abs(want[i]);
    std::array<double, 2> worst = errors;
    world_.comm().all_reduce(std::span(worst), comm::Reduce::max);
    for (size_t i = 0; i < got.size(); ++i)
      add({.kind = kinds[i].first, .name = "", .error = worst[i], .limit = kinds[i].second, .step = step});
    TrialResult::Step& row = done_.emplace_back();
    row = {got[0], want[0], got[1], want[1]};
  }

  TrialResult finish(double seconds) {
    const plan::RunPlan& plan = engine_->plan();
    const Config& c = config_.config;
    TrialResult out;
    out.grid = plan::grid_line(placement_.grid_position(), name_of(c.distributed.shard_strategy));
    out.options = fmt::format("micro {}, accumulate {}", plan.batch.micro, plan.batch.accumulation);
    out.model = fmt::format("{}, {} parameters, {}", model::name_of(plan.spec.family),
                            grouped(plan.whole.total()), name_of(plan.recipe.activations()));
    out.sequences = plan.batch.global;
    out.length = plan.sequence_length;
    out.limits = limits_;
    out.steps = done_;
    out.tensors = tensors_;
    out.seconds = seconds;
    for (auto& [key, check] : checks_) out.checks.push_back(std::move(check));
    std::stable_sort(out.checks.begin(), out.checks.end(),
                     [](const Check& a, const Check& b) { return a.severity() > b.severity(); });
    return out;
  }

  comm::World& world_;
  const ConfigResult& config_;
  const data::TokenDataset& data_;
  train::Placement placement_;  // must outlive the engines
  Reference reference_;
  std::unique_ptr<engine::Engine> engine_;
  int64_t steps_;
  Limits limits_;
  double reference_tokens_ = 1;
  std::map<std::pair<Kind, std::string>, Check> checks_;
  std::vector<TrialResult::Step> done_;
  size_t tensors_ = 0;
  bool ok_ = true;
};

}  // namespace

TrialResult run_trial(comm::World& world, const ConfigResult& config, const data::TokenDataset& data,
                      int64_t steps) {
  return Trial(world, config, data, steps).run();
}

}  // namespace nrl::verify
