#pragma once
// A model on one rank with its memory, parameters, gradients and optimizer. It owns no files, locks, terminal
// or datasets, so that one process can have any number of engines.

#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "apps/data/loader.h"
#include "apps/engine/fp8_weights.h"
#include "apps/engine/group_reducer.h"
#include "apps/engine/objective.h"
#include "apps/engine/optimizer.h"
#include "apps/engine/step_scalars.h"
#include "apps/engine/step_watch.h"
#include "apps/plan/run_plan.h"
#include "apps/plan/traffic.h"
#include "core/device/runtime.h"
#include "core/io/staging.h"
#include "core/ops/kernel_table.h"
#include "parallel/grid/groups.h"

namespace nrl::engine {

/// Training options that do not affect the plan.
struct TrainingOptions {
  OptimizerConfig optimizer;
  double max_grad_norm = 0;         ///< 0: no clipping
  int64_t max_nonfinite_steps = 1;  ///< after this many consecutive skipped steps, updates stop for good
  LossScale loss_scale;
  bool overlap_grad_reduce = true;
  bool overlap_param_gather = false;  ///< gather updated weights during the next forward pass; no graph
  bool cuda_graph = false;            ///< capture a step once and replay it
  StepLimits limits;
  std::shared_ptr<Objective> objective;  ///< null: LanguageModeling
};
TrainingOptions training_options(const Config& config);

struct StepInput {
  int64_t number;  ///< from 1; selects the dropout masks
  double learning_rate;
  int64_t loss_tokens;     ///< tokens with a target in the global batch: loss weights are -1 / loss_tokens
  StepRequests asks = {};  ///< of this rank
  StepBounds bounds = {};  ///< the same on all ranks
  bool eager = false;  ///< not as a graph (TrainingOptions::cuda_graph), so that trace ranges time its work
  /// Called when the work up to the reduced gradients is enqueued, before the update: for readers of
  /// GroupTensors::gradients. May run steps of other engines. Only in a step that is not a graph.
  std::function<void()> gradients_reduced = {};
  /// As Inspection::gradient, before the gradient is summed. Only in a step that is not a graph.
  std::function<void(int parameter, const Tensor& gradient)> gradient = {};
};

/// Gets the numbers of a step that Engine::inspect() repeats. Unset functions are skipped.
struct Inspection {
  model::ResultsWatch results = {};
  /// The gradient of a parameter (an index into ParameterList::all) is complete on this rank: not yet summed
  /// over others; of gradients in buckets one microbatch's.
  std::function<void(int parameter, const Tensor& gradient)> gradient = {};
  /// (N) f32: the log-probabilities of the targets of a microbatch; on ranks that report tokens.
  std::function<void(int microbatch, const Tensor& log_probs)> log_probs = {};
};

/// The result of a dry run of a step.
struct DryStep {
  ops::KernelSet kernels;
  size_t workspace = 0;          ///< that its largest op needs; rows go to experts evenly
  std::vector<ops::Call> calls;  ///< if asked for: in order, with costs and the trace ranges around them
  std::vector<plan::Traffic> traffic;  ///< in groups of several ranks; only of an engine without other ranks
  /// If calls are asked for, of an engine without other ranks: the operations of groups of several ranks, and
  /// the work with the host (policy.offload_*), in order with the calls. Operations that the step before has
  /// left in flight start first; those that this step leaves in flight are not waited for.
  std::vector<plan::TrafficEvent> events;
  std::vector<plan::TrafficGroup> groups;  ///< of the events
  int microbatches = 0;                    ///< that the calls and events are of
};

class Engine {
 public:
  /// Steps of an engine before the first one that is captured (TrainingOptions::cuda_graph): libraries select
  /// and load their kernels then, which capture does not allow.
  static constexpr int64_t immediate_steps = 2;

  /// Allocates the planned memory, zeroed, on the device of `exec`, the engine's workspace included. `ranks`
  /// has the groups and channels that the plan uses (plan::needed_groups(), plan::needed_channels()), for
  /// that device's memory. The exec's device and libraries and `ranks` must outlive the engine. Fails with
  /// Exit::out_of_memory; does not communicate, so that other ranks are not held up by one that fails.
  Engine(std::unique_ptr<plan::RunPlan> plan, const TrainingOptions& options, const parallel::Groups& ranks,
         const ops::Exec& exec);
  /// Forward passes only, for a plan made by make_forward_plan(): of one rank, and of a rank of a layout,
  /// with `ranks` as above.
  Engine(std::unique_ptr<plan::RunPlan> plan, const ops::Exec& exec);
  Engine(std::unique_ptr<plan::RunPlan> plan, const parallel::Groups& ranks, const ops::Exec& exec);
  /// One rank of a layout, without the others: only for dry runs.
  Engine(std::unique_ptr<plan::RunPlan> plan, const TrainingOptions& options, const ops::Exec& exec);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Runs a step with `objective` in which every op only records its kernel and its cost, and communicators
  /// count their operations: nothing is computed, communicated or waited for, and the memory of the engine is
  /// not accessed (libraries may build their plans). `calls`: also collects these, with the operations of
  /// groups between them, as a step after another one does them. `repetitions`: of the period of the step's
  /// program at most; one less changes nothing but the number of microbatches.
  DryStep dry_step(Objective& objective, bool calls = false, std::optional<int> repetitions = std::nullopt);
  /// The objective of the options. Tests may run steps with others.
  Objective& objective() { return *options_.objective; }
  /// The kernels of a dry step and of initializing the weights.
  ops::KernelSet kernels_needed(Objective& objective);
  /// The plan, after which the engine may only be destroyed.
  std::unique_ptr<plan::RunPlan> release() { return std::move(plan_); }
  /// Returns the number of kernels needed. Fails with Exit::unavailable, naming the missing ones, if the
  /// exec's table lacks some, or with the reason if a CUDA graph is wanted and cannot be captured. `device`:
  /// "the GPU" or "the CPU", for the message. Libraries::choices then has what runs the step's ops.
  int require_kernels(Objective& objective, std::string_view device);

  /// Sets microbatch `index` of the next step: see plan::BatchTensors::fill().
  void fill(int64_t index, const data::HostMicroBatch& batch, int64_t first_sample, float share = 1);
  /// Enqueues an optimizer step on all filled microbatches. The host does not wait for the device; at most
  /// two steps may be in flight. With TrainingOptions::cuda_graph all steps must have the same objective.
  void step(const StepInput& step, Objective& objective);
  /// The next update, which changes weights and optimizer state, waits for `until` on a GPU: they are copied
  /// meanwhile. Where the passes before it change state too, or are a graph, all of the next step waits.
  void hold_update(device::EventHandle until) { held_ = until; }
  /// Steps that may be in flight when the next one is enqueued: 1 on a GPU, 0 on a CPU and where gradients
  /// keep what they lost in fp8 (parallel::GradMemory::errors): collect() clears that after a skipped step,
  /// whose gradients are not used, and have lost an infinity if they are huge.
  int steps_ahead() const { return exec_.device && !keeps_errors_ ? 1 : 0; }
  /// Waits for the oldest step in flight and returns its result. Fails with StepStuck if a device does not
  /// finish it within the limit, and with the error of the group if that has lost a rank.
  StepResult collect();

  /// Repeats the passes of the last step, which must be collected, with the weights as they are now: those
  /// that it had if it was skipped. No gradients are summed and nothing is updated; weights, optimizer state,
  /// scales and counters keep their bits. fill() must not have been called since. Without graphs. Collective.
  void inspect(Objective& objective, const Inspection& inspection);

  /// Log-probabilities (N) f32 of the targets, without dropout; 0 for tokens without a target. In device
  /// memory, valid until the next call. Must not be called between fill() and step(). Collective over
  /// pipeline stages; only the last stage has the result.
  Tensor log_probs(const data::HostMicroBatch& batch);
  /// Runs `count` microbatches of `next` without dropout. `read` gets each of them, if this rank reports
  /// tokens (ModelLayout::reports_tokens()), with the head's output, valid during the call. `first`: see
  /// model::Decoder::evaluate(). Collective over pipeline stages.
  using Next = std::function<const data::HostMicroBatch&()>;
  void run_forward(int64_t count, const Next& next,
                   const std::function<void(const model::MicroBatch&, const model::HeadOutput&)>& read,
                   bool first = true);
  /// The sums of the objective's metrics over the microbatches of run_forward(), on this rank; 0 unless it
  /// reports tokens. Blocks.
  using Metrics = std::array<double, ops::StepScalar::max_metrics>;
  Metrics evaluate(int64_t count, const Next& next, bool first = true);

  const plan::RunPlan& plan() const { return *plan_; }
  /// For work on the state between steps.
  ops::Exec& exec() { return exec_; }
  /// Must be called before weights are read other than by this engine's passes: the gathers of the last step
  /// may be in flight (TrainingOptions::overlap_param_gather). Ordered by the exec's stream.
  void finish_gathers();
  /// (StepScalar::max_metrics) f64 that evaluations overwrite, free otherwise.
  const Tensor& spare_sums() const { return evaluation_; }
  /// (n) f64 for LayerStatistics; empty if not planned.
  Tensor layer_sums() const;
  /// The tensors of the parameter groups. Optimizer state is only valid for the ranges that this rank owns.
  const std::vector<GroupTensors>& groups() const { return groups_; }
  /// The weights that the layers read, indexed like ParameterList::all; not for sharded weights.
  std::vector<Tensor> weights() const;
  /// The weights that this rank keeps.
  std::vector<WeightSlice> weight_slices() const;
  /// Access to the memory of the tensors above through the plan's pinned buffers, after the work enqueued so
  /// far; on a CPU null, or what keeps no more of offloaded memory resident than needed. One at a time; must
  /// not outlive the engine.
  std::unique_ptr<Staging> staging();
  /// Must be called after writing the weights from outside: initializes the master weights, if any, from
  /// them. The next pass begins with writing those that are kept in FP8.
  void weights_written();
  /// Copies the weights as they are to the memory of the reference (plan::keeps_reference()).
  void keep_reference();
  /// Exchanges the weights with the reference's, bit for bit; the optimizer state stays. Must be called again
  /// before the next step: only forward passes may come between.
  void exchange_reference();
  /// Collective, before the first step, when every rank has its engine: registers its memory with the groups
  /// (distributed.nccl_ub).
  void register_memory();
  /// Must be called when a checkpoint is loaded: restores the optimizer's counters. Weights in FP8 are
  /// written before the next pass, too.
  void restore(const StepCounters& counters);

 private:
  Engine(std::unique_ptr<plan::RunPlan> plan, const TrainingOptions& options, const parallel::Groups* ranks,
         const ops::Exec& exec);
  Engine(std::unique_ptr<plan::RunPlan> plan, const parallel::Groups* ranks, const ops::Exec& exec);
  void allocate();
  void clear_errors();
  void bind();
  /// Calls `work` with equal parts of the trained weights and of the reference's, (1, n) each, of at most the
  /// bytes of the plan's exchange buffer, and with that buffer.
  template <class F>
  void for_parts_of_reference(F&& work);
  void gradient_ready(int parameter);
  /// To the other ranks: messages of the stages, and the reducer.
  void connect();
  /// Before a pass: writes and gathers the weights that are kept in FP8 if others were loaded.
  void refresh_fp8_weights();
  void run_schedule(std::span<const model::MicroBatch> batches, Objective& objective,
                    const std::function<void()>& gradients_reduced = {});
  void run_graph(std::span<const model::MicroBatch> batches, Objective& objective);
  /// Dry run: adds events to `out` from now on, first of operations that a step leaves in flight.
  void observe_traffic(DryStep& out, memory::HostObserver& host, Objective& objective);
  void wait_for_copy();

  std::unique_ptr<plan::RunPlan> plan_;
  TrainingOptions options_;
  comm::Ledger ledger_;                          // of dry_ranks_
  std::unique_ptr<parallel::Groups> dry_ranks_;  // of an engine without other ranks
  const parallel::Groups* ranks_ = nullptr;      // null: forward passes of one rank
  ops::Exec exec_;
  memory::Arenas arenas_;
  std::vector<std::unique_ptr<comm::Registration>> registrations_;
  std::vector<GroupTensors> groups_;
  std::deque<int> expert_rounds_;  // of the steps in flight
  bool reference_exchanged_ = false;
  Tensor step_scalars_;  // (ops::StepScalar::count) f64
  Tensor evaluation_;    // (ops::StepScalar::max_metrics) f64
  StepScalars scalars_;
  StepWatch watch_;
  std::unique_ptr<pipeline::StageMessages> messages_;  // with several stages
  std::unique_ptr<GroupReducer> reducer_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<Fp8Weights> fp8_weights_;
  bool fp8_stale_ = true;
  bool keeps_errors_ = false;                         // of gradients in fp8
  std::span<const model::MicroBatch> batches_;        // of the last step
  const Inspection* inspection_ = nullptr;            // in inspect()
  std::function<void(int, const Tensor&)> gradient_;  // of the step that is enqueued; may be empty
  device::EventHandle held_ = nullptr;                // see hold_update()
  device::Graph graph_;
  int64_t steps_ = 0;  // enqueued by this engine
};

}  // namespace nrl::engine
