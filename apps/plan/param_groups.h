#pragma once
// Parameter groups: parameters with a common flat layout, sharding strategy and optimizer call.

#include <functional>
#include <string>
#include <vector>

#include "apps/model/parameters.h"
#include "memory/plan.h"
#include "parallel/data/flat_buckets.h"
#include "parallel/grid/grid.h"
#include "precision/recipe.h"

namespace nrl::plan {

/// Consecutive elements that this rank updates and whose optimizer state it holds.
struct OwnedRange {
  int parameter = 0;              ///< index into ParameterList::all
  int64_t offset = 0, count = 0;  ///< in the parameter
  int64_t flat = 0;               ///< first element in the group's flat buffers
  int64_t state = 0;              ///< first element in the group's state tensors
  /// True on exactly one of the ranks that hold these elements: the one that adds them to the gradient norm
  /// and saves their state.
  bool counted = true;
};

/// A tensor of the optimizer state: "exp_avg", "exp_avg_sq", and "master" if the layers read bf16.
struct StateTensor {
  std::string name;
  DType dtype = DType::f32;
  memory::BufferId buffer = -1;
};

struct ParamGroup {
  std::string name;
  std::vector<int> parameters;  ///< indices into ParameterList::all, in the order of `layout`
  bool trainable = true;        ///< false: weights only
  /// The ranks that sum the gradients; the layout has one shard for each of them.
  parallel::GroupId reduce = parallel::group::dp_cp;
  parallel::FlatBuckets layout;
  parallel::ShardingStrategy strategy;
  DType weight = DType::f32, gradient = DType::f32;
  float lr_scale = 1;  ///< multiplies the learning rate
  std::vector<StateTensor> state;
  std::vector<OwnedRange> owned;
  /// Ranges of the flat gradients that this rank adds to the gradient norm.
  std::vector<parallel::ElementRange> counted;
  /// Ranges of the flat gradients that must be zero when a step begins: of the parameters whose gradients are
  /// accumulated from the first contribution on (model::Parameter::overwrites_gradient).
  std::vector<parallel::ElementRange> zeroed;
  std::vector<int64_t> chunk_table;  ///< ops::AdamW::chunks; rates 0: without weight decay, 1: with
  memory::BufferId weights = -1, gradients = -1, chunks = -1;  ///< -1: none (frozen)

  /// Whether the optimizer state is sharded over the ranks.
  bool sharded() const { return trainable && strategy.optimizer_state; }
  /// Elements of each state tensor on this rank.
  int64_t state_elements() const { return sharded() ? layout.shard_total() : layout.total(); }
};

/// Options of a group on one rank.
struct GroupOptions {
  parallel::GroupId reduce = parallel::group::dp_cp;  ///< see ParamGroup
  parallel::ShardingStrategy strategy;
  int shards = 1, shard_rank = 0;  ///< number of ranks in `reduce`; this rank's index
  int64_t bucket_elements = 0;     ///< see FlatBuckets
  precision::Recipe recipe;
  float lr_scale = 1;
  bool first_tp = true,
       first_embedding = true;  ///< whether this rank counts the elements of each model::Copies
};

/// The groups of a parameter list, in an order that is the same on all ranks: by `reduce`, then by their
/// first parameters. Declares all their buffers in `memory` (not yet solved).
std::vector<ParamGroup> make_param_groups(
    const model::ParameterList& parameters,
    const std::function<GroupOptions(const std::string& group)>& options, memory::MemoryPlan& memory);

}  // namespace nrl::plan
