#pragma once
// Parameter groups: parameters with a common flat layout, sharding strategy and optimizer call.

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "apps/model/program/stage.h"
#include "apps/model/spec/parameters.h"
#include "core/ops/exec.h"
#include "core/ops/optimizer.h"
#include "memory/plan.h"
#include "parallel/data/grad_reducer.h"
#include "parallel/grid/grid.h"
#include "precision/recipe.h"

namespace nrl::plan {

/// Consecutive elements that this rank updates and whose optimizer state it holds.
struct OwnedRange {
  int parameter = 0;              ///< index into ParameterList::all
  int64_t offset = 0, count = 0;  ///< in the parameter
  /// First element in the group's weights, gradients and state tensors (the offloaded state tensors if
  /// `offloaded`).
  int64_t weight = 0, gradient = 0, state = 0;
  /// True on exactly one of the ranks that hold these elements: the one that adds them to the gradient norm.
  bool counted = true;
  bool offloaded = false;  ///< the state lies in memory::Tier::host
};

/// A tensor of the optimizer state: "exp_avg", "exp_avg_sq", and "master" if the layers read bf16, which as
/// u16 has ops::AdamW::remainder.
struct StateTensor {
  std::string name;
  DType dtype = DType::f32;
  memory::BufferId buffer = -1;
  memory::BufferId scales = -1;  ///< -1: none (ops::has_moment_scales())
  /// The first elements of the state, in memory::Tier::host; -1: none.
  memory::BufferId offloaded = -1, offloaded_scales = -1;
};

/// One call of the update.
struct UpdateCall {
  parallel::ElementRange weights, gradients, state;  ///< ranges of the group's tensors
  bool offloaded = false;                            ///< `state` is one of the offloaded tensors
  /// The elements that are updated, relative to these ranges; rates 0: without weight decay, 1: with.
  std::vector<ops::AdamWRange> parts = {};
  int64_t first_chunk = 0, chunks = 0;  ///< rows of the group's ops::AdamW::chunks
};

struct ParamGroup {
  std::string name;
  std::vector<int> parameters;  ///< indices into ParameterList::all, in the order of `layout`
  bool trainable = true;        ///< false: weights only
  /// The ranks that sum the gradients; the layout has one shard for each of them, or for each of a slice.
  parallel::GroupId reduce = parallel::group::dp_cp;
  int64_t bucket_elements = 0;  ///< at which a bucket of `layout` is closed
  parallel::FlatBuckets layout;
  parallel::ShardingStrategy strategy;
  /// True if weights or gradients are kept in shards: the strategy shards them and there is more than one
  /// shard. Frozen groups have no gradients.
  bool weights_sharded = false, gradients_sharded = false;
  /// Layers read the weights from buffers per bucket (declare_buckets()).
  bool weights_gathered = false;
  /// Layers write the fp32 gradients of a microbatch into buffers per bucket, from where they are added to
  /// those that the rank keeps: these are in shards, or in bf16.
  bool gradient_buckets = false;
  /// Layers read the weights in FP8 only (ParamGroup::codes). `weights` are then what the optimizer updates,
  /// kept in shards as its state is.
  bool fp8 = false;
  /// Gradients in buckets: one may sum several microbatches, so that every contribution is added to zeros,
  /// even if the first one could overwrite (model::Parameter::overwrites_gradient).
  bool adds_microbatches = false;
  int replicas = 1;  ///< copies of all shards; the sums of shards are added up over them
  /// How gradients travel (parallel::ReduceOptions).
  DType wire = DType::f32;
  bool fp32_sums = false, error_feedback = false;
  int reduce_rank = 0;          ///< this rank's index in `reduce`
  bool overlap_gather = false;  ///< weights are gathered while gradients are reduced
  DType weight = DType::f32;
  DType gradient = DType::f32;       ///< type that layers write
  DType main_gradient = DType::f32;  ///< type that this rank keeps; with gradient_buckets only another one
  float lr_scale = 1;                ///< multiplies the learning rate
  std::vector<StateTensor> state;
  int64_t offloaded_elements = 0;  ///< the first of state_elements()
  std::vector<OwnedRange> owned;
  /// The parts of them whose state this rank saves, and the parameters whose weights it saves as far as it
  /// keeps them: ranks that hold the same share the writing.
  std::vector<OwnedRange> saved;
  std::vector<int> saved_weights;  ///< ascending
  /// Ranges of this rank's gradients that it adds to the gradient norm.
  std::vector<parallel::ElementRange> counted;
  /// Ranges of the flat layout whose gradients must be zero when a step begins: of the parameters whose
  /// gradients are accumulated from the first contribution on (model::Parameter::overwrites_gradient). With
  /// gradient_buckets when a microbatch begins to write a bucket, the padding included.
  std::vector<parallel::ElementRange> zeroed;
  std::vector<UpdateCall> updates;
  memory::BufferId weights = -1, gradients = -1, chunks = -1;  ///< -1: none (frozen)
  memory::BufferId codes = -1;                                 ///< code_elements() in FP8; -1: none
  memory::BufferId staging = -1;                               ///< GradMemory::staging; -1: none
  memory::BufferId errors = -1, sum_errors = -1;               ///< GradMemory's; -1: none
  /// Where parameters lie in these (OwnedRange::state); `counted`: this rank saves them.
  std::vector<OwnedRange> error_ranges, sum_error_ranges;
  /// By bucket, with weights_gathered and gradient_buckets: the buffers that layers read and write.
  std::vector<memory::BufferId> gathered, bucket_gradients;

  /// True if every rank owns a shard: the strategy shards the optimizer state, or the weights of a frozen
  /// group.
  bool sharded() const { return trainable ? strategy.optimizer_state : weights_sharded; }
  /// Elements of the optimizer state on this rank, offloaded ones included.
  int64_t state_elements() const { return sharded() ? layout.shard_total() : layout.total(); }
  int64_t resident_state_elements() const { return state_elements() - offloaded_elements; }
  int64_t weight_elements() const { return weights_sharded ? layout.shard_total() : layout.total(); }
  /// Elements of `codes`: sharded only where layers read buffers per bucket.
  int64_t code_elements() const { return weights_gathered ? layout.shard_total() : layout.total(); }
  /// The type of the weights that layers read and ranks gather.
  DType read_type() const { return fp8 ? DType::e4m3 : weight; }
  int64_t gradient_elements() const { return gradients_sharded ? layout.shard_total() : layout.total(); }
  parallel::ReduceOptions reduce_options(bool overlap) const;
  /// Sets adds_microbatches, and the ranges that must then be zero.
  void add_microbatches();
  /// The number of ops::AdamW::chunks of all updates, and their rows.
  int64_t chunk_count() const;
  std::vector<int64_t> chunk_rows() const;
  /// The ranks that have one shard each.
  parallel::GroupId shard_group() const { return replicas > 1 ? reduce.inside(layout.shards()) : reduce; }
  /// The ranks that have the same shard, if there are replicas.
  parallel::GroupId replica_group() const { return reduce.across_slices(layout.shards()); }
  /// FP8 groups: the ranks that have parts of its weights and agree on their scales, with `tensor`
  /// tensor-parallel ranks, which share no blocks; none: each has all.
  std::optional<parallel::GroupId> scale_group(int tensor, Scaling scaling) const;
  /// shard_group() for gathers of sharded weights, on a lane of its own if gathers overlap.
  parallel::GroupId gather_group() const { return shard_group().on_lane(overlap_gather ? 1 : 0); }
};

/// Adds this rank's part of the squared norm of a group's gradients to `norm`, (1) f64. `gradients`: the flat
/// ones that the rank keeps.
void add_squared_norm(ops::Exec& exec, const ParamGroup& group, const Tensor& gradients, const Tensor& norm);

/// Options of a group on one rank.
struct GroupOptions {
  parallel::GroupId reduce = parallel::group::dp_cp;  ///< see ParamGroup
  parallel::ShardingStrategy strategy;
  int shards = 1, shard_rank = 0;  ///< number of ranks that share the state; this rank's index
  int replicas = 1, replica = 0;   ///< number of copies of all shards; the index of this rank's
  DType wire = DType::f32;         ///< see ParamGroup
  bool fp32_sums = false, error_feedback = false;
  bool overlap_gather = false;
  /// See FlatBuckets; unset: auto_bucket_elements().
  std::optional<int64_t> bucket_elements = {};
  precision::Recipe recipe;
  /// The type in which gradients are kept: bf16 only if the strategy shards the optimizer state.
  DType main_gradients = DType::f32;
  float lr_scale = 1;
  bool first_tp = true;  ///< whether this rank counts the elements of model::Copies::tp
  double offloaded = 0;  ///< share of the optimizer state in memory::Tier::host
  bool updates = true;   ///< false: without ParamGroup::updates and their chunk table, which take longest
  /// Bytes of a checkpoint, below which further ranks that hold the same write nothing.
  int64_t least_saved = int64_t{8} << 20;
};

/// Offloaded elements of a group are a multiple of this, or all.
inline constexpr int64_t offload_unit = 1024;
/// Elements of weights and gradients, with the padding between them, that an offloaded update handles at a
/// time, and the buffers through which a GPU's go: one is copied to the host while another is updated and a
/// third copied back.
inline constexpr int64_t offload_piece = int64_t{1} << 20;
inline constexpr int offload_slots = 3;

/// The groups of a parameter list, in an order that is the same on all ranks: by `reduce`, then by their
/// first parameters. Declares all their buffers in `memory` (not yet solved).
std::vector<ParamGroup> make_param_groups(
    const model::ParameterList& parameters,
    const std::function<GroupOptions(const std::string& group)>& options, memory::MemoryPlan& memory);

/// The buckets of groups with ParamGroup::weights_gathered or gradient_buckets.
model::ShardedParameters sharded_parameters(std::span<const ParamGroup> groups);

/// Declares the buffers of these buckets in `memory` (not yet solved): ParamGroup::gathered and
/// ParamGroup::bucket_gradients.
void declare_buckets(std::span<ParamGroup> groups, const program::RangesOfBuckets& ranges,
                     memory::MemoryPlan& memory);

}  // namespace nrl::plan
