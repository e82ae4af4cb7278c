#pragma once
// The decoder of one rank: its layers in chunks, the memory they need, and what runs through them. A dry run
// of the schedules declares the memory; bind() gives it.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "apps/model/interpreter.h"
#include "memory/plan.h"
#include "precision/recipe.h"

namespace nrl::model {

struct DecoderOptions {
  int64_t tokens = 0;        ///< N of a microbatch: sequences * length
  int64_t max_sequence = 0;  ///< longest sequence
  precision::Recipe recipe;
  RecomputePolicy recompute = {};  ///< none: activations are kept
  int threads = 1;                 ///< as Exec::partials() will be
  uint64_t seed = 0;               ///< dropout
  DeviceType device = DeviceType::cpu;
  size_t optimizer_workspace = 0;  ///< what the step's end needs on a GPU; it runs while the decoder does not
  /// Of one optimizer step, with all chunks of the model on this rank. Empty: nothing is trained.
  pipeline::Schedule training = {};
  /// What the dry run goes through in its place: a shorter list whose microbatches have the same lives.
  /// Empty: the whole list.
  pipeline::Schedule recorded = {};
};


class Decoder {
 public:
  /// Declares every buffer of the forward and backward pass in `plan` (not yet solved). `spec` and
  /// `parameters` outlive the decoder. The ops must support the recipe.
  Decoder(const ModelSpec& spec, const ParameterList& parameters, DecoderOptions options,
          memory::MemoryPlan& plan);
  ~Decoder();

  /// Gives the decoder its memory. `views` are indexed like ParameterList::all; `gradient_ready(p)` is called
  /// when parameter p's gradient is complete for the step. The exec's workspace is set to the planned one.
  void bind(const memory::MemoryPlan& plan, const memory::Arenas& arenas, ops::Exec& exec,
            std::vector<ParameterView> views, std::function<void(int)> gradient_ready);

  /// One optimizer step, by the schedule. Gradients are added to. While the kernels of a step are collected
  /// (ops::Exec::needed) it goes through the dry run's list: what follows needs the same ones.
  void train(std::span<const MicroBatch> batches, const StepHooks& hooks);
  /// A forward pass that no backward pass follows; nothing is dropped.
  void evaluate(const MicroBatch& batch);
  /// The log-probabilities (N) f32 of the last microbatch's targets (0 where there is none).
  const Tensor& log_prob() const { return context_.log_prob; }

  /// For tests: `at_tick` is called when the work of each tick begins, the clock of the planned lifetimes.
  void watch_ticks(std::function<void(int tick)> at_tick) { stage_->watch_ticks(std::move(at_tick)); }

  const DecoderOptions& options() const { return options_; }

 private:
  const ModelSpec& spec_;
  DecoderOptions options_;
  LayerContext context_;
  std::unique_ptr<Stage> stage_;
  pipeline::Schedule evaluation_;  // of one microbatch
  int training_program_ = 0, evaluation_program_ = 0;
  std::vector<memory::BufferId> slots_;  // by number in the dry run
  struct {
    memory::BufferId log_prob, rope, workspace;
  } buffers_{};
  size_t workspace_bytes_ = 0;
};

}  // namespace nrl::model
