#pragma once
// The plan of a training run: flat layout, slots of the decoder, batch tensors. It contains everything that
// the run allocates and is complete before the first allocation; `nrl-train plan` prints it.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/model/decoder.h"
#include "apps/plan/batch.h"
#include "apps/plan/grid_position.h"
#include "apps/plan/param_groups.h"
#include "apps/plan/recompute.h"
#include "core/config/load.h"
#include "core/device/cpu/features.h"
#include "core/ops/linear.h"
#include "memory/plan.h"

namespace nrl::plan {

/// Steps of an engine whose results are not collected yet (engine::StepScalars).
inline constexpr int max_steps_in_flight = 2;
/// Sums of a layer in RunPlan::layer_sums (engine::LayerStatistics).
inline constexpr int layer_sum_kinds = 5;

struct RunPlan {
  model::ModelSpec spec;  ///< of the whole model
  model::ModelLayout layout;
  GridPosition position;
  std::vector<parallel::GroupId> group_ids;       ///< needed_groups()
  std::vector<parallel::GroupChannels> channels;  ///< needed_channels()
  model::ParameterList parameters;                ///< of this rank
  BatchPlan batch;
  int64_t sequence_length = 0;
  DeviceType device = DeviceType::cpu;
  int partials = 1;                                        ///< Exec::partials()
  ops::Bf16Products products = ops::Bf16Products::upcast;  ///< CPU: KernelTable::bf16_products
  precision::Recipe recipe;
  std::vector<model::RecomputeRule> recompute;  ///< by block of the model
  std::vector<model::OffloadRule> offload;      ///< the same
  std::string recompute_reason;  ///< why policy.recompute: auto chose these; empty where it does not choose

  memory::MemoryPlan memory;
  std::string offload_directory;  ///< memory.offload_dir; empty: unset
  std::vector<ParamGroup> groups;
  memory::BufferId scalars = -1, host_scalars = -1, evaluation = -1;
  /// keeps_reference(): the trained groups' weights of the reference, one after another, and memory through
  /// which they are exchanged with the trained ones; else -1.
  memory::BufferId reference = -1, reference_exchange = -1;
  memory::BufferId staging = -1;  ///< GPU: see add_staging()
  /// GPU runs with offloaded optimizer state: page-locked memory of engine::OffloadedUpdate, offload_slots
  /// buffers of `offload_slot_bytes` and a copy of the step's scalars; the CPU's kernels and threads.
  memory::BufferId offload_staging = -1;
  /// (blocks, embedding and head x layer_sum_kinds) f64, with logger.layer_stats_period; else -1.
  memory::BufferId layer_sums = -1;
  int64_t offload_slot_bytes = 0;
  cpu::Isa host_isa = cpu::Isa::baseline;
  int host_threads = 1;
  std::unique_ptr<BatchTensors> tensors;
  std::unique_ptr<model::Decoder> decoder;

  /// Most tokens of a microbatch, over its context-parallel ranks.
  int64_t microbatch_tokens() const { return tensors->shape().sequences * tensors->shape().length; }

  /// The parameters of the whole model. The first call makes them, because few plans need them and experts
  /// have many; it must not run on two threads at once.
  const model::ParameterList& whole() const;

 private:
  mutable std::unique_ptr<const model::ParameterList> whole_;
};

/// The solved plan of the rank at `position` with `threads` CPU threads. On the heap, because the decoder
/// refers to its members. `config` must have passed validate_for_world(). Planning for a GPU does not need
/// one. `loss`: for an objective other than the configured one.
/// `memory`: bytes of the GPU if the rank has it to itself, or the rank's share of the machine's, which
/// policy.recompute: auto needs to know: it must be the same on all ranks. 0: unknown.
std::unique_ptr<RunPlan> make_run_plan(const Config& config, const model::ModelSpec& spec,
                                       const BatchPlan& batch, const GridPosition& position,
                                       DeviceType device, int threads,
                                       const std::optional<model::LossNeeds>& loss = {}, size_t memory = 0);

/// Declares the workspace of the passes and of the update in a plan that has everything else that they use.
void add_workspace(RunPlan& plan);

/// Describes what is recomputed, and for auto why: "norm, activation: keeping everything takes ...". Covers
/// this rank's blocks if auto chose, else all. Empty if the configuration keeps everything.
std::string recompute_text(const RunPlan& plan);

/// Describes what is moved to the host: "everything", "input in layers 0-3"; empty: nothing.
std::string offload_text(const RunPlan& plan);

/// Declares the pinned buffers through which weights and optimizer state are saved and loaded: two, each of
/// 16 MiB, or less if all tensors are smaller. Nothing on a CPU.
void add_staging(RunPlan& plan);

/// The options of a parameter group on the rank at `position`.
GroupOptions group_options(const Config& config, const GridPosition& position,
                           const precision::Recipe& recipe, std::string_view group);

/// The CPU's kernels: kernels.isa, where auto is ops::cpu_choice().
cpu::Isa isa_for(const KernelsConfig& kernels);

/// True if FP8 copies of weights are kept through a step (policy.fp8_cfg.cache_weights).
bool caches_fp8_weights(const Config& config);
/// policy.precision, policy.logits_dtype and policy.fp8_cfg of a model of `layers` layers for this device.
/// auto is bf16 on a GPU and f32 on a CPU; fastest is bf16 on a CPU that multiplies it natively. FP8 operands
/// are rounded from it.
precision::Recipe recipe_for(const Config& config, DeviceType device, int64_t layers);

/// Describes the choice of recipe_for() and its reason, for the banner; empty if there was nothing to choose.
std::string precision_choice(const Config& config, DeviceType device);

/// "fp8 tensorwise", with the layers if not all read FP8 operands; empty without FP8.
std::string fp8_text(const Config& config, const RunPlan& plan);

/// Memory by category, for messages: "weights 475 MiB  gradients ...  = 2.31 GiB, offloaded 1.2 GiB".
std::string memory_line(const memory::MemoryPlan& plan);

}  // namespace nrl::plan
