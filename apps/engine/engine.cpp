#include "apps/engine/engine.h"

#include <algorithm>
#include <exception>
#include <set>
#include <utility>

#include "apps/engine/mapped_staging.h"
#include "apps/engine/objective_choice.h"
#include "apps/engine/pinned_staging.h"
#include "apps/model/decoder.h"
#include "core/base/log.h"
#include "core/base/philox.h"
#include "core/ops/coverage.h"
#include "core/ops/dry_run.h"
#include "core/ops/libraries.h"
#include "core/ops/optimizer.h"
#include "core/ops/transfer.h"
#include "core/trace/trace.h"

namespace nrl::engine {

using S = ops::StepScalar;

TrainingOptions training_options(const Config& config) {
  TrainingOptions options;
  options.optimizer = config.policy.optimizer;
  options.max_grad_norm = config.policy.max_grad_norm.value_or(0);
  const LoopConfig& loop = resolved_loop(config);
  options.max_nonfinite_steps = loop.on_nonfinite == OnNonfinite::stop ? 1 : loop.max_nonfinite_steps;
  if (const auto scaling = resolved_loss_scaling(config.policy))
    options.loss_scale = scaling->dynamic
                             ? LossScale{.initial = ops::initial_loss_scale, .growth_interval = 2000}
                             : LossScale{.initial = scaling->scale};
  options.overlap_grad_reduce = config.distributed.overlap_grad_reduce;
  options.overlap_param_gather = config.distributed.overlap_param_gather;
  options.cuda_graph = config.policy.cuda_graph;
  options.objective = make_objective(config);
  return options;
}

Engine::Engine(std::unique_ptr<plan::RunPlan> plan, const TrainingOptions& options,
               const parallel::Groups& ranks, const ops::Exec& exec)
    : Engine(std::move(plan), options, &ranks, exec) {}

Engine::Engine(std::unique_ptr<plan::RunPlan> plan, const TrainingOptions& options, const ops::Exec& exec)
    : Engine(std::move(plan), options, nullptr, exec) {}

Engine::Engine(std::unique_ptr<plan::RunPlan> plan, const TrainingOptions& options,
               const parallel::Groups* ranks, const ops::Exec& exec)
    : plan_(std::move(plan)), options_(options), ranks_(ranks), exec_(exec) {
  NRL_CHECK(!options.overlap_param_gather || !options.cuda_graph);
  if (!ranks_) {
    const plan::RunPlan& p = *plan_;
    dry_ranks_ = std::make_unique<parallel::Groups>(p.position.grid, p.group_ids, p.channels, ledger_);
    ranks_ = dry_ranks_.get();
  }
  // From here on a rank may be out of memory, and no other may wait for it in this constructor.
  allocate();
  step_scalars_ = make_tensor(arenas_.at(plan_->memory, plan_->scalars), DType::f64, {S::count});
  void* host = exec_.device ? arenas_.at(plan_->memory, plan_->host_scalars) : nullptr;
  scalars_ = StepScalars(step_scalars_, static_cast<double*>(host), options.loss_scale, exec_);
  watch_ = StepWatch(options.limits);
  bind();
  connect();
  if (plan_->spec.moe.experts > 0) plan_->decoder->add_router_metrics(step_scalars_.rows(S::router, 3));
  if (options.loss_scale.active()) plan_->decoder->scale_loss(step_scalars_.rows(S::loss_scale, 1));
  OffloadedUpdate::Staging staging;
  OffloadedUpdate::Host updates;
  if (plan_->offload_staging >= 0) {
    staging = {static_cast<std::byte*>(arenas_.at(plan_->memory, plan_->offload_staging)),
               plan_->offload_slot_bytes};
    updates = {&ops::cpu_kernels(plan_->host_isa), plan_->host_threads};
  }
  if (std::any_of(groups_.begin(), groups_.end(), [](const GroupTensors& t) { return t.group->fp8; }))
    fp8_weights_ = std::make_unique<Fp8Weights>(groups_, plan_->parameters, plan_->decoder->fp8().kept(),
                                                plan_->layout.tensor, *ranks_, exec_);
  keeps_errors_ =
      std::any_of(groups_.begin(), groups_.end(), [](const GroupTensors& t) { return bool(t.errors); });
  optimizer_ = std::make_unique<Optimizer>(options_.optimizer, options_.max_grad_norm,
                                           options_.max_nonfinite_steps, options_.loss_scale.growth_interval,
                                           groups_, step_scalars_, arenas_, staging, updates, exec_);
}

Engine::Engine(std::unique_ptr<plan::RunPlan> plan, const ops::Exec& exec)
    : Engine(std::move(plan), nullptr, exec) {}

Engine::Engine(std::unique_ptr<plan::RunPlan> plan, const parallel::Groups& ranks, const ops::Exec& exec)
    : Engine(std::move(plan), &ranks, exec) {}

Engine::Engine(std::unique_ptr<plan::RunPlan> plan, const parallel::Groups* ranks, const ops::Exec& exec)
    : plan_(std::move(plan)), ranks_(ranks), exec_(exec) {
  NRL_CHECK(ranks_ || plan_->position.ranks() == 1);
  allocate();
  bind();
  if (ranks_) connect();
}

void Engine::connect() {
  if (plan_->layout.stages > 1) {
    messages_ = std::make_unique<pipeline::StageMessages>(ranks_->channels(parallel::group::pp),
                                                          plan_->layout.stages, plan_->layout.stage);
    plan_->decoder->connect(*messages_);
  }
  reducer_ = std::make_unique<GroupReducer>(groups_, *ranks_, options_.overlap_grad_reduce, exec_);
  plan_->decoder->connect(reducer_.get());
}

Engine::~Engine() {
  if (std::uncaught_exceptions() > 0) return;
  try {
    finish_gathers();
  } catch (const std::exception& e) {
    log::warn("gathering the weights of the last step: {}", e.what());
  }
}

void Engine::finish_gathers() {
  if (reducer_) reducer_->wait_gathers();
}

namespace {

/// Adds the work with the host to the events of a dry run.
class HostTraffic : public memory::HostObserver {
 public:
  HostTraffic(comm::Ledger& ledger, DryStep& out, const ops::Exec& exec)
      : ledger_(ledger), out_(out), exec_(exec) {}

  int start(memory::HostWork work, int64_t bytes, int after) override {
    const int number = ledger_.next_number();
    add({.operation = number, .after = after, .group = -1, .purpose = comm::Purpose::offload, .bytes = bytes},
        work);
    return number;
  }
  void wait(int number) override {
    add({.wait = true, .operation = number, .group = -1, .purpose = comm::Purpose::offload}, {});
  }

 private:
  void add(const comm::Ledger::Event& what, std::optional<memory::HostWork> work) {
    out_.events.push_back({.what = what,
                           .host = work,
                           .calls = out_.calls.size(),
                           .step = exec_.step,
                           .microbatch = exec_.microbatch});
  }

  comm::Ledger& ledger_;
  DryStep& out_;
  const ops::Exec& exec_;
};

}  // namespace

DryStep Engine::dry_step(Objective& objective, bool calls, std::optional<int> repetitions) {
  NRL_CHECK(optimizer_, "this engine runs forward passes only");
  DryStep out;
  ledger_.clear();
  model::Decoder& decoder = *plan_->decoder;
  decoder.limit_repetitions(repetitions);
  const program::Period& period = decoder.program(memory::training).period;
  const int times = std::min(period.times, repetitions.value_or(period.times));
  out.microbatches =
      static_cast<int>(plan_->batch.accumulation) - (period.times - times) * period.microbatches;
  {
    const parallel::DryGroups dry_ranks(dry_ranks_ ? nullptr : ranks_);
    const ops::DryRun dry(exec_, calls ? &out.calls : nullptr);
    HostTraffic host(ledger_, out, exec_);
    if (calls && dry_ranks_) observe_traffic(out, host, objective);
    run_schedule(plan_->tensors->largest(), objective);
    ledger_.observe({});
    decoder.copies().observe(nullptr);
    optimizer_->observe(nullptr);
    finish_gathers();
    decoder.limit_repetitions(std::nullopt);
    out.kernels = dry.kernels();
    out.workspace = dry.workspace();
  }
  if (!dry_ranks_) return out;
  const std::vector<parallel::GroupId> ids = dry_ranks_->ids();
  for (const parallel::GroupId& id : ids)
    out.groups.push_back({id, dry_ranks_->member(id) ? (*dry_ranks_)[id].size() : 1});
  for (const comm::Ledger::Sum& sum : ledger_.sums()) {
    const parallel::GroupId& id = ids[sum.group];
    const int ranks = (*dry_ranks_)[id].size();
    if (ranks > 1) out.traffic.push_back({id, ranks, sum.op, sum.purpose, sum.count, sum.bytes});
  }
  return out;
}

void Engine::observe_traffic(DryStep& out, memory::HostObserver& host, Objective& objective) {
  plan_->decoder->copies().observe(&host);
  optimizer_->observe(&host);
  std::set<int> alone;  // operations of groups of one rank
  const std::vector<parallel::GroupId> ids = dry_ranks_->ids();
  ledger_.observe([&out, this, ids, alone](const comm::Ledger::Event& e) mutable {
    if (!e.wait && (*dry_ranks_)[ids[e.group]].size() == 1) alone.insert(e.operation);
    if (!alone.contains(e.operation))
      out.events.push_back(
          {.what = e, .calls = out.calls.size(), .step = exec_.step, .microbatch = exec_.microbatch});
  });
  if (!options_.overlap_param_gather) return;
  // Gathers of the step before end in this one.
  run_schedule(plan_->tensors->largest(), objective);
  std::set<int> waited;
  for (const plan::TrafficEvent& e : out.events)
    if (e.what.wait) waited.insert(e.what.operation);
  std::erase_if(out.events, [&](const plan::TrafficEvent& e) { return waited.contains(e.what.operation); });
  for (plan::TrafficEvent& e : out.events) e.calls = 0;
  out.calls.clear();
  ledger_.clear();
}

ops::KernelSet Engine::kernels_needed(Objective& objective) {
  const DryStep step = dry_step(objective);
  NRL_CHECK(step.workspace <= exec_.workspace.size, "the plan has {} bytes of workspace, a step needs {}",
            exec_.workspace.size, step.workspace);
  const ops::DryRun dry(exec_);
  initialize_master_weights(exec_, groups_);
  return step.kernels | dry.kernels();
}

int Engine::require_kernels(Objective& objective, std::string_view device) {
  const ops::KernelSet needed = kernels_needed(objective);
  ops::require_kernels(*exec_.kernels, needed, device);
  if (options_.cuda_graph && exec_.libraries && !exec_.libraries->not_capturable.empty())
    fail(Exit::unavailable,
         "policy.cuda_graph: a step of this model cannot be captured: {}. Fix: policy.cuda_graph: false",
         exec_.libraries->not_capturable);
  return needed.size();
}

void Engine::allocate() {
  std::optional<ops::DryRun> dry;  // uploads nothing
  if (dry_ranks_) dry.emplace(exec_);
  if (!options_.objective) options_.objective = std::make_shared<LanguageModeling>();
  const memory::MemoryPlan& memory = plan_->memory;
  if (exec_.device)
    arenas_ = memory::Arenas(memory, *exec_.device, exec_.stream,
                             ranks_ ? ranks_->allocator() : device::Allocator());
  else if (dry_ranks_)
    arenas_ = memory::Arenas::unreserved(memory);
  else if (ranks_ && memory.bytes(memory::Tier::host) > 0)
    arenas_ = memory::Arenas(memory, cpu::scratch_directory(plan_->offload_directory));
  else
    arenas_ = memory::Arenas(memory);
  groups_ = bind_groups(plan_->groups, memory, arenas_, exec_);
  evaluation_ = make_tensor(arenas_.at(memory, plan_->evaluation), DType::f64, {S::max_metrics});
}

Tensor Engine::layer_sums() const {
  if (plan_->layer_sums < 0) return {};
  return make_tensor(arenas_.at(plan_->memory, plan_->layer_sums), DType::f64,
                     {(plan_->spec.layers + 2) * plan::layer_sum_kinds});
}

void Engine::register_memory() {
  if (!ranks_->registers()) return;
  const memory::MemoryPlan& memory = plan_->memory;
  std::string layout;
  for (const memory::MemoryPlan::Buffer& b : memory.buffers())
    if (b.tier == memory::Tier::device) layout += fmt::format("{} {} {}\n", b.name, b.bytes, b.offset);
  registrations_ = ranks_->register_memory(arenas_.memory(memory::Tier::device), name_hash(layout));
}

void Engine::bind() {
  std::optional<ops::DryRun> dry;  // computes no tables
  if (dry_ranks_) dry.emplace(exec_);
  plan_->tensors->bind(plan_->memory, arenas_, exec_);
  plan_->decoder->bind(
      plan_->memory, arenas_, exec_, parameter_views(plan_->parameters, groups_),
      [this](int parameter) { gradient_ready(parameter); },
      [this](int parameter) {
        if (reducer_) reducer_->wait_gather(parameter);
      },
      ranks_);
}

void Engine::gradient_ready(int parameter) {
  const auto& read = inspection_ ? inspection_->gradient : gradient_;
  if (read) {
    const std::vector<model::ParameterView> views = parameter_views(plan_->parameters, groups_);
    read(parameter, views[static_cast<size_t>(parameter)].grad);
  }
  if (!inspection_) reducer_->ready(parameter);
}

std::vector<Tensor> Engine::weights() const {
  return parameter_weights(plan_->parameters, groups_);
}

std::vector<WeightSlice> Engine::weight_slices() const {
  return engine::weight_slices(plan_->parameters, groups_);
}

std::unique_ptr<Staging> Engine::staging() {
  const memory::MemoryPlan& memory = plan_->memory;
  if (!exec_.device) {
    if (memory.bytes(memory::Tier::host) == 0) return nullptr;
    return std::make_unique<MappedStaging>(arenas_);
  }
  const auto bytes = static_cast<size_t>(memory.buffers()[plan_->staging].bytes);
  return std::make_unique<PinnedStaging>(
      *exec_.device, exec_.stream,
      std::span(static_cast<std::byte*>(arenas_.at(memory, plan_->staging)), bytes),
      arenas_.memory(memory::Tier::host));
}

void Engine::weights_written() {
  initialize_master_weights(exec_, groups_);
  for (const GroupTensors& t : groups_) initialize_offloaded_master(exec_, t, arenas_);
  fp8_stale_ = true;
}

template <class F>
void Engine::for_parts_of_reference(F&& work) {
  NRL_CHECK(plan_->reference >= 0, "the plan keeps no reference");
  finish_gathers();
  const memory::MemoryPlan& memory = plan_->memory;
  auto* reference = static_cast<std::byte*>(arenas_.at(memory, plan_->reference));
  void* const exchange = arenas_.at(memory, plan_->reference_exchange);
  const int64_t at_once = memory.buffers()[static_cast<size_t>(plan_->reference_exchange)].bytes;
  for (const GroupTensors& t : groups_) {
    if (!t.group->trainable) continue;
    const int64_t size = size_of(t.weights.dtype), elements = t.weights.numel();
    auto* weights = static_cast<std::byte*>(t.weights.data);
    for (int64_t left = elements, n = 0; left > 0; left -= n) {
      n = std::min(left, at_once / size);
      const auto part = [&](void* data) { return make_tensor(data, t.weights.dtype, {1, n}); };
      work(part(weights), part(reference), part(exchange));
      weights += n * size;
      reference += n * size;
    }
  }
}

void Engine::keep_reference() {
  NRL_CHECK(!reference_exchanged_);
  for_parts_of_reference([this](const Tensor& weights, const Tensor& reference, const Tensor&) {
    ops::copy(exec_, weights, reference);
  });
}

void Engine::exchange_reference() {
  reference_exchanged_ = !reference_exchanged_;
  for_parts_of_reference([this](const Tensor& weights, const Tensor& reference, const Tensor& exchange) {
    ops::copy(exec_, weights, exchange);
    ops::copy(exec_, reference, weights);
    ops::copy(exec_, exchange, reference);
  });
}

void Engine::restore(const StepCounters& counters) {
  scalars_.restore(counters);
  fp8_stale_ = true;
}

void Engine::refresh_fp8_weights() {
  if (!fp8_weights_ || !std::exchange(fp8_stale_, false)) return;
  finish_gathers();
  fp8_weights_->write();
  reducer_->gather_fp8();
}

void Engine::fill(int64_t index, const data::HostMicroBatch& batch, int64_t first_sample, float share) {
  plan_->tensors->fill(index, batch, first_sample, share);
}

void Engine::step(const StepInput& step, Objective& objective) {
  NRL_CHECK(optimizer_ && !dry_ranks_, "this engine does not train");
  NRL_CHECK(!reference_exchanged_, "the weights are the reference's");
  NRL_CHECK(!keeps_errors_ || expert_rounds_.empty(), "the last step must be collected first");
  NRL_CHECK(objective.metrics().size() <= S::max_metrics);
  refresh_fp8_weights();
  const std::span<const model::MicroBatch> batches = plan_->tensors->commit(step.number, step.loss_tokens);
  batches_ = batches;
  scalars_.begin(step.learning_rate, step.asks, step.bounds);
  plan_->decoder->take_expert_rounds();  // of an evaluation
  const bool graph = options_.cuda_graph && !step.eager;
  if (exec_.device) watch_.begin(step.number, graph);
  NRL_CHECK(!graph || !(step.gradients_reduced || step.gradient));
  gradient_ = step.gradient;
  if (graph || keeps_errors_) wait_for_copy();
  if (graph)
    run_graph(batches, objective);
  else
    run_schedule(batches, objective, step.gradients_reduced);
  gradient_ = {};
  scalars_.finish();
  plan_->decoder->copies().end_step();
  expert_rounds_.push_back(plan_->decoder->take_expert_rounds());
  ++steps_;
}

StepResult Engine::collect() {
  if (const device::Event* done = scalars_.oldest()) watch_.wait(*done, (*ranks_)[parallel::group::all]);
  StepResult result = scalars_.collect();
  result.copies = plan_->decoder->copies().collect();
  result.expert_rounds = expert_rounds_.front();
  expert_rounds_.pop_front();
  if (result.skipped) clear_errors();
  return result;
}

void Engine::clear_errors() {
  for (const GroupTensors& t : groups_)
    for (const Tensor& errors : {t.errors, t.sum_errors})
      if (errors) ops::zero(exec_, {.x = errors});
}

void Engine::wait_for_copy() {
  if (held_) exec_.device->wait(exec_.stream, std::exchange(held_, nullptr));
}

// Enqueues the work of one step (a CPU executes it here). Must not wait for the device or depend on the step
// number, so that it can be captured in a graph.
void Engine::run_schedule(std::span<const model::MicroBatch> batches, Objective& objective,
                          const std::function<void()>& gradients_reduced) {
  model::Decoder& decoder = *plan_->decoder;
  // The head computes its gradients in the forward pass, so the loss weights must be known before.
  const auto in_head = [](model::Dependence d) {
    return d == model::Dependence::batch ? model::Dependence::none : d;
  };
  NRL_CHECK(in_head(objective.dependence()) == in_head(decoder.options().loss.dependence),
            "the plan was made for another objective");
  decoder.set_rule(&objective);
  if (objective.dependence() == model::Dependence::batch) {
    decoder.evaluate(batches, [&](int microbatch) {
      objective.loss_weights(exec_, batches[microbatch], decoder.log_prob(batches[microbatch]));
    });
    plan_->tensors->loss_weights_overwritten();
  }
  const auto count = static_cast<int64_t>(objective.metrics().size());
  reducer_->start();
  model::StepHooks hooks;
  hooks.log_probs_ready = [&](int microbatch) {
    if (!plan_->layout.reports_tokens()) return;
    if (inspection_) {
      if (inspection_->log_probs) inspection_->log_probs(microbatch, decoder.log_prob(batches[microbatch]));
      return;
    }
    objective.add_metrics(exec_, batches[microbatch], decoder.head_output(batches[microbatch]),
                          step_scalars_.rows(S::metrics, count));
  };
  hooks.finish_reduce = [&] { reducer_->finish(); };
  hooks.update = [&] {
    if (inspection_) return;
    if (gradients_reduced) gradients_reduced();
    wait_for_copy();
    reducer_->wait_gathers();  // of weights that no pass has read
    decoder.add_expert_load();
    optimizer_->step((*ranks_)[parallel::group::all]);
    decoder.update_router_bias(step_scalars_);
    decoder.update_scales();
    if (fp8_weights_) fp8_weights_->write();
    if (options_.overlap_param_gather)
      reducer_->start_gather();
    else
      reducer_->gather();
  };
  decoder.train(batches, hooks);
}

namespace {

/// Copies of tensors, which get their contents back.
class Kept {
 public:
  Kept(ops::Exec& exec, std::initializer_list<Tensor> tensors) : exec_(exec) {
    for (const Tensor& t : tensors) {
      if (!t) continue;
      kept_.emplace_back(t, std::vector<std::byte>(static_cast<size_t>(t.bytes())));
      ops::download(exec_, t, kept_.back().second.data());
    }
  }
  void put_back() {
    for (const auto& [t, values] : kept_) ops::upload(exec_, t, values.data());
  }

 private:
  ops::Exec& exec_;
  std::vector<std::pair<Tensor, std::vector<std::byte>>> kept_;
};

}  // namespace

void Engine::inspect(Objective& objective, const Inspection& inspection) {
  NRL_CHECK(optimizer_ && !batches_.empty() && expert_rounds_.empty(), "there is no step to inspect");
  model::Decoder& decoder = *plan_->decoder;
  const model::DelayedScales& delayed = decoder.fp8().delayed();
  Kept kept(exec_, {step_scalars_, delayed.scale, delayed.amax});
  inspection_ = &inspection;
  reducer_->set_local(true);
  const model::ResultsWatch before = decoder.watch_results({});
  decoder.watch_results([&](const model::StepResults& results) {
    if (before) before(results);
    if (inspection.results) inspection.results(results);
  });
  run_schedule(batches_, objective);
  decoder.watch_results(before);
  reducer_->set_local(false);
  inspection_ = nullptr;
  kept.put_back();
  optimizer_->zero_gradients();
  decoder.copies().end_step();
  decoder.copies().collect();
  decoder.take_expert_rounds();
}

void Engine::run_graph(std::span<const model::MicroBatch> batches, Objective& objective) {
  if (steps_ < immediate_steps) {
    run_schedule(batches, objective);
    return;
  }
  if (!graph_) {
    device::Capture capture(*exec_.device, exec_.stream);
    run_schedule(batches, objective);
    graph_ = device::Graph(*exec_.device, capture.end());
  }
  graph_.launch(exec_.stream);
}

Tensor Engine::log_probs(const data::HostMicroBatch& batch) {
  refresh_fp8_weights();
  plan_->tensors->fill(0, batch, 0);
  const model::MicroBatch& filled = plan_->tensors->commit(0, 0).front();
  plan_->decoder->evaluate(filled);
  return plan_->decoder->log_prob(filled);
}

void Engine::run_forward(int64_t count, const Next& next,
                         const std::function<void(const model::MicroBatch&, const model::HeadOutput&)>& read,
                         bool first) {
  refresh_fp8_weights();
  const plan::RunPlan& p = *plan_;
  const auto at_once = static_cast<int64_t>(p.decoder->options().evaluated);
  for (int64_t i = 0; i < count; i += at_once) {
    const int64_t n = std::min(at_once, count - i);
    for (int64_t m = 0; m < n; ++m) p.tensors->fill(m, next(), 0);
    const std::span<const model::MicroBatch> batches = p.tensors->commit(0, 0);
    p.decoder->evaluate(
        batches,
        [&](int m) {
          if (p.layout.reports_tokens()) read(batches[m], p.decoder->head_output(batches[m]));
        },
        first && i == 0);
  }
}

Engine::Metrics Engine::evaluate(int64_t count, const Next& next, bool first) {
  Metrics sums{};
  ops::upload(exec_, evaluation_, sums.data());
  const auto metrics = static_cast<int64_t>(objective().metrics().size());
  run_forward(
      count, next,
      [&](const model::MicroBatch& batch, const model::HeadOutput& out) {
        objective().add_metrics(exec_, batch, out, evaluation_.rows(0, metrics));
      },
      first);
  ops::download(exec_, evaluation_, sums.data());
  return sums;
}

}  // namespace nrl::engine
