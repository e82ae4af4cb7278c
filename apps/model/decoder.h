#pragma once
// The decoder of one rank: its layers in chunks, their memory, and the schedules that run on them. A dry run
// of the schedules declares the buffers, another one finds the workspace of the ops; bind() assigns the
// planned memory.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apps/model/chunks.h"
#include "apps/model/linear/fp8_state.h"
#include "apps/model/program/stage.h"
#include "memory/plan.h"
#include "precision/recipe.h"

namespace nrl::model {

struct DecoderOptions {
  int64_t tokens = 0;        ///< most tokens of a microbatch on this rank, N
  int64_t max_sequence = 0;  ///< longest sequence
  int64_t sequences = 1;     ///< samples of equal length in N, where the router's losses are per sequence
  precision::Recipe recipe;
  RecomputePolicy recompute = {};  ///< empty: all activations are kept
  OffloadPolicy offload = {};      ///< empty: kept activations stay on the device
  uint64_t seed = 0;               ///< of dropout
  DeviceType device = DeviceType::cpu;
  bool fuse_activation = true;    ///< ChunkOptions
  int64_t head_chunk_tokens = 0;  ///< tokens whose logits exist at once; 0: head_chunk_tokens()
  ModelLayout layout = {};        ///< the rank's part of the model
  /// Schedule of one optimizer step, of the layout's stage and chunks, with a period if it is long
  /// (pipeline::shortest_equivalent). Empty: no training.
  pipeline::Schedule training = {};
  /// Schedules of steps with fewer microbatches, from 1; those without actions cannot be executed.
  std::vector<pipeline::Schedule> fewer = {};
  /// With several stages: microbatches that evaluate() takes at once instead of one by one.
  int evaluated = 1;
  ShardedParameters sharded = {};
  LossNeeds loss = {};  ///< of the objective
};

/// Tokens of a chunk of the head, for `tokens` in a microbatch: equal chunks whose logits are at most 128 MiB
/// on a CPU and 2 GiB on a GPU, or of 32 tokens.
int64_t head_chunk_tokens(int64_t tokens, int64_t vocab, DType logits, DeviceType device);

class Decoder {
 public:
  /// Declares all buffers of the forward and backward pass in `plan` (not yet solved). `spec` describes the
  /// whole model; `parameters` belong to the layout and must outlive the decoder. The ops must support the
  /// recipe.
  Decoder(const ModelSpec& spec, const ParameterList& parameters, DecoderOptions options,
          memory::MemoryPlan& plan);
  ~Decoder();

  /// The workspace that the ops need in the passes of a microbatch, found by a dry run of them (ops::DryRun)
  /// with as many rows for experts as there may be. `exec`: of the planned device, or of one like it
  /// (ops::DryDevice). `views`, `groups`: as for bind(), which must be called afterwards; no memory is
  /// accessed.
  size_t needed_workspace(ops::Exec& exec, std::vector<ParameterView> views, const MicroBatch& batch,
                          const parallel::Groups* groups = nullptr);
  /// Declares the workspace in the plan. The ops of a step outside of the decoder use it, too.
  void add_workspace(memory::MemoryPlan& plan, size_t bytes);

  /// Assigns the planned memory and sets the exec's workspace. `views` are indexed like ParameterList::all;
  /// `gradient_ready(p)` is called when the gradient of parameter p is complete for the step,
  /// `weight_needed(p)` before an op that reads its weights is enqueued. `groups`: what the layers
  /// communicate in; not needed by a layout of one rank.
  void bind(const memory::MemoryPlan& plan, const memory::Arenas& arenas, ops::Exec& exec,
            std::vector<ParameterView> views, std::function<void(int)> gradient_ready,
            std::function<void(int)> weight_needed = {}, const parallel::Groups* groups = nullptr);
  /// The messages of the layout's stage, which must outlive the decoder. Must be called before a schedule of
  /// several stages is executed.
  void connect(pipeline::StageMessages& messages) { messages_ = &messages; }

  /// Executes the schedule of one optimizer step, the one for this number of microbatches. Accumulates into
  /// the gradients.
  void train(std::span<const MicroBatch> batches, const StepHooks& hooks);
  /// Forward passes without dropout. `log_probs_ready`: see StepHooks. All stages must have the same number
  /// of batches. `first`: false if nothing but evaluations came since a call with true, so that weights that
  /// it rounded to FP8 can be used again.
  void evaluate(std::span<const MicroBatch> batches, const std::function<void(int)>& log_probs_ready = {},
                bool first = true);
  void evaluate(const MicroBatch& batch) { evaluate({&batch, 1}); }
  /// False: evaluations run the model without its adapters.
  void use_adapters(bool use) { context_.adapters = use; }
  /// The largest number of rounds of a layer with experts in a microbatch since the last call, at least 1.
  int take_expert_rounds() { return std::exchange(expert_rounds_, 1); }
  /// LayerContext::expert_load.
  void set_expert_load(double load) { context_.expert_load = load; }
  /// train() repeats the period of its program at most this often, for dry runs: what comes after it is then
  /// of microbatches with lower numbers. Unset: as often as the step has microbatches for.
  void limit_repetitions(std::optional<int> most) { most_repetitions_ = most; }
  /// Training passes add the router's losses and load to `metrics`, (3) f64 (ops::RouterBalance).
  void add_router_metrics(const Tensor& metrics) { context_.router_metrics = metrics; }
  /// To be called after the passes of a step, before its metrics are read: adds the load where the counts of
  /// experts are not summed over the ranks of a microbatch until now.
  void add_expert_load();
  /// Multiplies the gradients of all losses by `scale`, (1) f64, as it is when a step is executed.
  void scale_loss(const Tensor& scale) { context_.loss_scale = scale; }
  /// To be called after the update of a step with its scalars (ops::StepScalar): moves the biases of routers
  /// by the tokens of all ranks in the step.
  void update_router_bias(const Tensor& scalars);
  /// To be called after the passes of a step: the scales of FP8 tensors for the next one, from what all ranks
  /// have measured. Only with scales that outlive a step.
  void update_scales() { fp8_->update(*context_.exec, context_.groups); }
  const Fp8State& fp8() const { return *fp8_; }
  /// The objective of training, which must have the needs of the options and outlive its passes.
  void set_rule(LossRule* rule) { context_.rule = rule; }
  /// The results of the head for the last microbatch, which was `batch`: log-probabilities (N) f32 of the
  /// targets, 0 for tokens without a target, and what the options' needs name. Only the last stage has them.
  HeadOutput head_output(const MicroBatch& batch) const { return context_.results(batch.ids.dim(0)); }
  Tensor log_prob(const MicroBatch& batch) const { return head_output(batch).log_prob; }

  /// The program of training as text (program::text()).
  std::string program_text() const;
  /// The program of training or evaluation of one microbatch, which Call::step of a dry run is an index of.
  const program::Program& program(memory::Mode mode) const {
    return stage_->program(mode == memory::training ? training_ : evaluation_);
  }
  /// The layer of a program's step, and the entry of its table for a compute step.
  const Layer& layer(const program::Step& step) const { return stage_->layer(step.layer); }
  const memory::Step& step(const program::Step& step) const {
    return layer(step).table().steps()[step.index];
  }
  /// Stage::buckets() of all schedules.
  const program::RangesOfBuckets& buckets() const { return stage_->buckets(); }
  /// The table of every block of this rank.
  struct BlockTable {
    int block = 0;
    const memory::LayerTable* table = nullptr;
  };
  std::vector<BlockTable> blocks() const;
  /// Bytes of a microbatch that backward passes read of a block, by what becomes of them in between.
  struct BlockBytes {
    int block = 0;
    int64_t kept = 0, recomputed = 0, offloaded = 0;
  };
  std::vector<BlockBytes> block_bytes() const;
  /// The copies of offloaded activations, by step.
  memory::HostCopies& copies() { return stage_->copies(); }
  /// Bytes of a slot for a microbatch.
  int64_t bytes_of(const memory::SlotSpec& slot) const { return stage_->bytes_of(slot); }
  /// Executes the steps of sharded weights and gradients, also while kernels are collected
  /// (ops::Exec::needed). Null: they are skipped.
  void connect(ShardedSteps* sharded) { stage_->connect(sharded); }

  /// For tests: `at_tick` is called before each tick (the time unit of planned lifetimes).
  void watch_ticks(std::function<void(int tick)> at_tick) { stage_->watch_ticks(std::move(at_tick)); }
  /// Stage::watch_results() of all programs.
  ResultsWatch watch_results(ResultsWatch at_results) { return stage_->watch_results(std::move(at_results)); }
  /// The layers and slots that steps of programs name.
  const program::Layers& all_layers() const { return stage_->all_layers(); }

  const DecoderOptions& options() const { return options_; }
  /// Tokens whose logits exist at once.
  int64_t head_chunk() const { return head_chunk_; }

 private:
  const ModelSpec part_;                            ///< tensor_part() of the model
  std::vector<std::pair<int, int>> router_biases_;  ///< layer and parameter
  DecoderOptions options_;
  LayerContext context_;
  int expert_rounds_ = 1;  // LayerContext::expert_rounds
  std::optional<int> most_repetitions_;
  std::unique_ptr<Stage> stage_;
  /// Calls `work(block, index of its layer on this rank)` for the blocks of this rank.
  template <class F>
  void for_each_block(F&& work) const;
  void run(int program, std::span<const MicroBatch> batches, const StepHooks& hooks, bool first = true,
           std::optional<int> times = {});
  void add_training_programs();

  void declare_loss(memory::MemoryPlan& plan);
  void bind_loss(const memory::MemoryPlan& plan, const memory::Arenas& arenas);
  int64_t most_segments() const { return options_.tokens * options_.layout.context; }

  /// Rows of LayerContext::expert_counts.
  int64_t counted_rows() const;

  pipeline::StageMessages* messages_ = nullptr;
  // Programs of the stage; -1: none. Evaluations of one microbatch, and of DecoderOptions::evaluated.
  int training_ = -1, evaluation_ = -1, evaluations_ = -1;
  /// The program of DecoderOptions::fewer, and how often it repeats its period.
  struct Fewer {
    int program = -1, times = 0;
  };
  std::vector<Fewer> fewer_;
  std::vector<float> shares_;  // MicroBatch::share of the last step
  struct {
    memory::BufferId log_prob, rope, router_counts, expert_counts, workspace = -1;
    memory::BufferId lse = -1, entropy = -1, weight = -1, entropy_weight = -1, top_ids = -1, top_logits = -1,
                     of_segments = -1;  // of the loss
  } buffers_{};
  std::unique_ptr<Fp8State> fp8_;
  size_t workspace_bytes_ = 0;
  int64_t head_chunk_ = 0;
};

}  // namespace nrl::model
