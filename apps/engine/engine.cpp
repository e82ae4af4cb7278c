#include "apps/engine/engine.h"

#include "apps/model/decoder.h"
#include "core/ops/coverage.h"
#include "core/ops/kernel_table.h"
#include "core/ops/optimizer/optimizer.h"
#include "core/ops/transfer.h"

namespace nrl::engine {

using S = ops::StepScalar;

TrainingOptions training_options(const Config& config) {
  TrainingOptions options;
  options.optimizer = config.policy.optimizer;
  options.max_grad_norm = config.policy.max_grad_norm.value_or(0);
  options.max_nonfinite_steps =
      config.pretrain.on_nonfinite == OnNonfinite::stop ? 1 : config.pretrain.max_nonfinite_steps;
  options.overlap_grad_reduce = config.distributed.overlap_grad_reduce;
  options.cuda_graph = config.policy.cuda_graph;
  return options;
}

Engine::Engine(std::unique_ptr<plan::RunPlan> plan, const TrainingOptions& options, comm::Communicator& dp,
               const ops::Exec& exec)
    : plan_(std::move(plan)), options_(options), dp_(&dp), exec_(exec) {
  allocate();
  scalars_ = StepScalars(flat_.scalars, exec_);
  bind();
  reducer_ = std::make_unique<GradReducer>(
      plan_->layout, std::span(flat_.gradients.ptr<float>(), static_cast<size_t>(flat_.gradients.numel())),
      dp, plan_->sharding, options.overlap_grad_reduce, comm::StreamRef{exec_.stream});
  optimizer_ = std::make_unique<Optimizer>(*plan_, options_.optimizer, options_.max_grad_norm,
                                           options_.max_nonfinite_steps, flat_, exec_);
}

Engine::Engine(std::unique_ptr<plan::RunPlan> plan, const ops::Exec& exec)
    : plan_(std::move(plan)), exec_(exec) {
  allocate();
  bind();
}

Engine::~Engine() = default;

int Engine::require_kernels(const plan::RunPlan& plan, const ops::Exec& exec, std::string_view device) {
  const auto needed = model::training_kernels(plan.spec, plan.recipe);
  ops::require_kernels(*exec.kernels, needed, device);
  return static_cast<int>(needed.size());
}

void Engine::allocate() {
  const plan::RunPlan& p = *plan_;
  arenas_ = exec_.device ? memory::Arenas(p.memory, *exec_.device, exec_.stream) : memory::Arenas(p.memory);
  const int64_t total = p.layout.total(), state = p.state_elements();
  const auto view = [&](memory::BufferId id, DType dtype, int64_t n) {
    return id < 0 ? Tensor{} : make_tensor(arenas_.at(p.memory, id), dtype, {n});
  };
  flat_.weights = view(p.weights, p.recipe.weights, total);
  flat_.gradients = view(p.gradients, DType::f32, total);
  flat_.master = view(p.master, DType::f32, state);
  flat_.exp_avg = view(p.exp_avg, DType::f32, state);
  flat_.exp_avg_sq = view(p.exp_avg_sq, DType::f32, state);
  flat_.scalars = view(p.scalars, DType::f64, S::count);
  evaluation_ = view(p.evaluation, DType::f64, 1);
  if (p.chunks < 0) return;
  const auto chunks = static_cast<int64_t>(p.chunk_table.size()) / 4;
  flat_.chunks = make_tensor(arenas_.at(p.memory, p.chunks), DType::i64, {chunks, 4});
  ops::upload(exec_, flat_.chunks, p.chunk_table.data());
}

void Engine::bind() {
  plan::RunPlan& p = *plan_;
  std::vector<model::ParameterView> views;
  for (size_t i = 0; i < p.parameters.all.size(); ++i)
    views.push_back({p.parameter(flat_.weights, i), dp_ ? p.parameter(flat_.gradients, i) : Tensor{}});
  p.tensors->bind(p.memory, arenas_, exec_);
  p.decoder->bind(p.memory, arenas_, exec_, std::move(views),
                  [this](int parameter) { reducer_->ready(parameter); });
}

std::vector<Tensor> Engine::weights() const {
  std::vector<Tensor> out;
  for (size_t i = 0; i < plan_->parameters.all.size(); ++i) out.push_back(plan_->parameter(flat_.weights, i));
  return out;
}

void Engine::weights_written() {
  if (!flat_.master) return;
  // From the rounded weights, so that the first step sees what the layers see.
  for (const plan::OwnedRange& r : plan_->owned)
    ops::convert(exec_, flat_.weights.rows(r.flat, r.count), flat_.master.rows(r.state, r.count));
}

void Engine::restore(int64_t updates, int64_t skipped_in_a_row) {
  scalars_.restore(updates, skipped_in_a_row);
}

void Engine::fill(int64_t index, const data::MicroBatch& batch, int64_t first_sample) {
  plan_->tensors->fill(index, batch, first_sample);
}

void Engine::step(const StepInput& step, Objective& objective) {
  NRL_CHECK(dp_, "this engine runs forward passes only");
  NRL_CHECK(objective.metrics().size() <= S::max_metrics);
  plan_->tensors->commit(step.number, step.loss_tokens);
  scalars_.begin(step.learning_rate, step.stop);
  if (options_.cuda_graph)
    run_graph(objective);
  else
    run_schedule(objective);
  scalars_.finish();
  ++steps_;
}

StepResult Engine::collect() {
  return scalars_.collect();
}

// The work of one step, enqueued (on a CPU: done). Nothing here waits for the device or depends on the step's
// number, so that it can be captured.
void Engine::run_schedule(Objective& objective) {
  model::Decoder& decoder = *plan_->decoder;
  const std::vector<model::MicroBatch>& batches = plan_->tensors->microbatches();
  // The head computes its gradients in the forward pass, so the weights must be there before.
  if (objective.needs_log_probs_first()) {
    for (const model::MicroBatch& batch : batches) {
      decoder.evaluate(batch);
      objective.weights(exec_, batch, decoder.log_prob());
    }
    plan_->tensors->weights_overwritten();
  }
  const auto count = static_cast<int64_t>(objective.metrics().size());
  reducer_->start();
  decoder.train(batches, {
                             .scored =
                                 [&](int microbatch) {
                                   objective.add_metrics(exec_, batches[static_cast<size_t>(microbatch)],
                                                         decoder.log_prob(),
                                                         flat_.scalars.rows(S::metrics, count));
                                 },
                             .finish_reduce = [&] { reducer_->finish(); },
                             .step =
                                 [&] {
                                   optimizer_->step(*dp_);
                                   reducer_->gather_params(comm::View(
                                       flat_.weights.data, flat_.weights.numel(), flat_.weights.dtype));
                                 },
                         });
}

// The first steps run immediately: libraries choose and load their kernels then.
void Engine::run_graph(Objective& objective) {
  constexpr int64_t immediate_steps = 2;
  if (steps_ < immediate_steps) {
    run_schedule(objective);
    return;
  }
  if (!graph_) {
    exec_.device->begin_capture(exec_.stream);
    run_schedule(objective);
    graph_ = device::Graph(*exec_.device, exec_.device->end_capture(exec_.stream));
  }
  graph_.launch(exec_.stream);
}

Tensor Engine::log_probs(const data::MicroBatch& batch) {
  plan_->tensors->fill(0, batch, 0);
  plan_->tensors->commit(0, 0);
  plan_->decoder->evaluate(plan_->tensors->microbatches().front());
  return plan_->decoder->log_prob();
}

double Engine::evaluate(int64_t count, const std::function<const data::MicroBatch&()>& next) {
  double sum = 0;
  ops::upload(exec_, evaluation_, &sum);
  for (int64_t i = 0; i < count; ++i) ops::add_sum(exec_, {log_probs(next()), evaluation_});
  ops::download(exec_, evaluation_, &sum);
  return sum;
}

}  // namespace nrl::engine
