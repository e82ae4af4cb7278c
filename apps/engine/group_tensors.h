#pragma once
// The tensors of the parameter groups of a plan, in device memory or in a host copy.

#include <span>
#include <string_view>
#include <vector>

#include "apps/model/program/layer.h"
#include "apps/plan/param_groups.h"
#include "core/ops/exec.h"
#include "memory/plan.h"

namespace nrl::engine {

/// The flat tensors of a group, which must outlive them.
struct GroupTensors {
  const plan::ParamGroup* group = nullptr;
  Tensor weights;    ///< (weight_elements()); read by the layers if neither gathered nor FP8
  Tensor codes;      ///< (code_elements()) e4m3: what the layers read of FP8 groups; else empty
  Tensor gradients;  ///< (gradient_elements()) f32 or bf16; empty if frozen
  /// (resident_state_elements()) each, in the order of ParamGroup::state, and the scales of each of them,
  /// (ops::moment_blocks() of these) u8 or empty.
  std::vector<Tensor> state, scales;
  /// The same of (offloaded_elements) in memory::Tier::host; empty if nothing is offloaded.
  std::vector<Tensor> offloaded, offloaded_scales;
  Tensor chunks;  ///< (C, 4) i64, rows of its updates (ops::adamw_chunks()); empty if frozen
  /// By bucket, (its size): what layers read of gathered weights, in ParamGroup::read_type(), and write of
  /// gradients in buckets.
  std::vector<Tensor> gathered, bucket_gradients;
  /// parallel::GradMemory::staging, errors and sum_errors; may be empty
  Tensor staging, errors, sum_errors;

  /// A tensor of the optimizer state by name, or its offloaded part; empty if the group has none of this
  /// name.
  Tensor find(std::string_view name, bool of_offloaded = false) const;
  /// Its scales; empty if it has none.
  Tensor find_scales(std::string_view name, bool of_offloaded = false) const;
};

/// The groups' tensors in the memory of a solved plan. Uploads the chunks.
std::vector<GroupTensors> bind_groups(std::span<const plan::ParamGroup> groups,
                                      const memory::MemoryPlan& plan, const memory::Arenas& arenas,
                                      ops::Exec& exec);

/// Weight and gradient of every parameter as views of the groups' tensors, indexed like ParameterList::all.
/// Gradients of frozen parameters are empty.
std::vector<model::ParameterView> parameter_views(const model::ParameterList& parameters,
                                                  std::span<const GroupTensors> groups);
/// The weights, which no group may keep in shards.
std::vector<Tensor> parameter_weights(const model::ParameterList& parameters,
                                      std::span<const GroupTensors> groups);

/// A part of a weight in this rank's memory.
struct WeightSlice {
  int parameter = 0;  ///< index into ParameterList::all
  model::Part part;   ///< a rectangle of one of its parts; `offset` is in the parameter
  Tensor values;      ///< (part.numel()) contiguous
};
/// The weights that this rank keeps between steps: all whole parts of groups that are not sharded, and of
/// sharded ones its shards as rectangles of their parts, at most three per range.
std::vector<WeightSlice> weight_slices(const model::ParameterList& parameters,
                                       std::span<const GroupTensors> groups);
/// All parts of whole weights, which are indexed like ParameterList::all.
std::vector<WeightSlice> whole_slices(const model::ParameterList& parameters,
                                      std::span<const Tensor> weights);

/// Sets the master weights to the (rounded) weights that the layers read, so that both
/// agree in the first step; those in the memory of the device.
void initialize_master_weights(ops::Exec& exec, std::span<const GroupTensors> groups);

}  // namespace nrl::engine
