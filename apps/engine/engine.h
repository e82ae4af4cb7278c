#pragma once
// A model with everything that computes on it, on one rank: memory, parameters, gradients, optimizer. It owns
// no file, lock, terminal or data set, so that any number of engines live in one process.

#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "apps/data/loader.h"
#include "apps/engine/group_reducer.h"
#include "apps/engine/objective.h"
#include "apps/engine/optimizer.h"
#include "apps/engine/step_scalars.h"
#include "apps/plan/run_plan.h"
#include "core/device/runtime.h"
#include "core/ops/kernel_table.h"
#include "parallel/comm/communicator.h"

namespace nrl::engine {

/// How an engine trains, beside what its plan says.
struct TrainingOptions {
  OptimizerConfig optimizer;
  double max_grad_norm = 0;         ///< 0: gradients are not clipped
  int64_t max_nonfinite_steps = 1;  ///< after so many skipped steps in a row nothing is updated any more
  bool overlap_grad_reduce = true;
  bool cuda_graph = false;  ///< steps are captured once and replayed
};
TrainingOptions training_options(const Config& config);

struct StepInput {
  int64_t number;  ///< from 1; it selects the dropout masks
  double learning_rate;
  int64_t
      loss_tokens;    ///< tokens with a target in the global batch: the batch's weights are -1 / loss_tokens
  bool stop = false;  ///< the result asks all ranks to stop
};

class Engine {
 public:
  /// Allocates the plan's memory, zeroed, on the device of `exec`. `dp` is the data-parallel group for memory
  /// of that device. The exec's device and libraries and `dp` must outlive the engine, which has a workspace
  /// of its own. Fails with Exit::out_of_memory.
  Engine(std::unique_ptr<plan::RunPlan> plan, const TrainingOptions& options, comm::Communicator& dp,
         const ops::Exec& exec);
  /// Forward passes only, for a plan of make_forward_plan().
  Engine(std::unique_ptr<plan::RunPlan> plan, const ops::Exec& exec);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// The kernels that setting the weights and a step on `objective` call, found by making a step in which
  /// every op only says what it would call: nothing is computed, communicated or waited for.
  ops::KernelSet kernels_needed(Objective& objective);
  /// Fails with Exit::unavailable, naming them, where the exec's table lacks some of them; returns how many
  /// are needed. `device`: "the GPU".
  int require_kernels(Objective& objective, std::string_view device);

  /// Tokens and targets of microbatch `index` of the next step. `first_sample` is the number of its first
  /// sample in the global batch.
  void fill(int64_t index, const data::MicroBatch& batch, int64_t first_sample);
  /// Enqueues an optimizer step on all filled microbatches. The host does not wait for the device; at most
  /// two steps may be in flight. With TrainingOptions::cuda_graph every step must have the same objective.
  void step(const StepInput& step, Objective& objective);
  /// The result of the oldest step in flight; blocks until it is there.
  StepResult collect();

  /// The log-probabilities (N) f32 of the targets (0 where there is none), without dropout, in the device's
  /// memory until the next call. No step may be filled and not yet made.
  Tensor log_probs(const data::MicroBatch& batch);
  /// The sum of log_probs() over `count` calls of `next`, on this rank. Blocks.
  double evaluate(int64_t count, const std::function<const data::MicroBatch&()>& next);

  const plan::RunPlan& plan() const { return *plan_; }
  /// For work on the state between steps.
  ops::Exec& exec() { return exec_; }
  /// The tensors of the parameter groups; what another rank's shard holds is not valid.
  const std::vector<GroupTensors>& groups() const { return groups_; }
  /// Weights of every parameter, what the layers read; indexed like ParameterList::all.
  std::vector<Tensor> weights() const;
  /// The weights were written from outside: master copies, where there are any, start from them.
  void weights_written();
  /// The optimizer's counters, from a checkpoint.
  void restore(int64_t updates, int64_t skipped_in_a_row);

 private:
  void allocate();
  void bind();
  void run_schedule(Objective& objective);
  void run_graph(Objective& objective);

  std::unique_ptr<plan::RunPlan> plan_;
  TrainingOptions options_;
  comm::Communicator* dp_ = nullptr;  // null: forward passes only
  ops::Exec exec_;
  memory::Arenas arenas_;
  std::vector<GroupTensors> groups_;
  Tensor step_scalars_;  // (ops::StepScalar::count) f64
  Tensor evaluation_;    // (1) f64
  StepScalars scalars_;
  std::unique_ptr<GroupReducer> reducer_;
  std::unique_ptr<Optimizer> optimizer_;
  device::Graph graph_;
  int64_t steps_ = 0;  // made by this engine
};

}  // namespace nrl::engine
