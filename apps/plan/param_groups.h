#pragma once
// Parameters by what happens to them: those of a group share a flat layout, a sharding strategy and an
// optimizer call.

#include <functional>
#include <string>
#include <vector>

#include "apps/model/parameters.h"
#include "memory/plan.h"
#include "parallel/data/flat_buckets.h"
#include "precision/recipe.h"

namespace nrl::plan {

/// A run of elements that this rank updates and whose optimizer state it holds.
struct OwnedRange {
  int parameter = 0;              ///< index into ParameterList::all
  int64_t offset = 0, count = 0;  ///< in the parameter
  int64_t flat = 0;               ///< first element in the group's flat buffers
  int64_t state = 0;              ///< first element in the tensors of its state
  /// Of all ranks that hold these elements this is the one that adds them to the gradient norm and saves
  /// their state.
  bool counted = true;
};

/// A tensor that the optimizer keeps: "exp_avg", "exp_avg_sq", and "master" where the layers read bf16.
struct StateTensor {
  std::string name;
  DType dtype = DType::f32;
  memory::BufferId buffer = -1;
};

struct ParamGroup {
  std::string name;
  std::vector<int> parameters;  ///< indices into ParameterList::all, in the order of `layout`
  bool trainable = true;        ///< false: weights only
  FlatBuckets layout;
  ShardingStrategy strategy;  ///< over as many ranks as the layout has shards
  DType weight = DType::f32, gradient = DType::f32;
  float lr_scale = 1;  ///< of the step's learning rate
  std::vector<StateTensor> state;
  std::vector<OwnedRange> owned;
  /// Runs of the flat gradients whose squares this rank adds to the norm.
  std::vector<ElementRange> counted;
  std::vector<int64_t> chunk_table;  ///< ops::AdamW::chunks; index 0 of the rates: no decay, 1: decay
  memory::BufferId weights = -1, gradients = -1, chunks = -1;  ///< -1: none (frozen)

  /// Whether the ranks keep a part of the state each.
  bool sharded() const { return trainable && strategy.optimizer_state; }
  /// Elements of each tensor of the state.
  int64_t state_elements() const { return sharded() ? layout.shard_total() : layout.total(); }
};

/// What is decided for a group, on one rank.
struct GroupOptions {
  ShardingStrategy strategy;
  int shards = 1, shard_rank = 0;  ///< the group's data-parallel ranks, and which of them this is
  int64_t bucket_elements = 0;     ///< see FlatBuckets
  precision::Recipe recipe;
  float lr_scale = 1;
  bool first_tp = true, first_embedding = true;  ///< whether model::Copies are counted on this rank
};

/// The groups of a parameter list, in the order in which their names first appear, with all their buffers
/// declared in `memory` (not yet solved).
std::vector<ParamGroup> make_param_groups(
    const model::ParameterList& parameters,
    const std::function<GroupOptions(const std::string& group)>& options, memory::MemoryPlan& memory);

}  // namespace nrl::plan
