#pragma once
// The tensors of the parameter groups of a plan, in device memory or in a host copy.

#include <span>
#include <string_view>
#include <vector>

#include "apps/model/layer.h"
#include "apps/plan/param_groups.h"
#include "core/ops/exec.h"
#include "memory/plan.h"

namespace nrl::engine {

/// The flat tensors of a group, which must outlive them.
struct GroupTensors {
  const plan::ParamGroup* group = nullptr;
  Tensor weights;             ///< (layout.total()), read by the layers
  Tensor gradients;           ///< (layout.total()) f32; empty if frozen
  std::vector<Tensor> state;  ///< (state_elements()) each, in the order of ParamGroup::state
  Tensor chunks;              ///< (C, 4) i64, the group's chunk_table; empty if frozen

  /// A tensor of the optimizer state by name; empty if the group has none of this name.
  Tensor find(std::string_view name) const;
};

/// The groups' tensors in the memory of a solved plan. Uploads the chunk tables.
std::vector<GroupTensors> bind_groups(std::span<const plan::ParamGroup> groups,
                                      const memory::MemoryPlan& plan, const memory::Arenas& arenas,
                                      ops::Exec& exec);

/// Weight and gradient of every parameter as views of the groups' tensors, indexed like ParameterList::all.
/// Gradients of frozen parameters are empty.
std::vector<model::ParameterView> parameter_views(const model::ParameterList& parameters,
                                                  std::span<const GroupTensors> groups);
/// The weights of parameter_views().
std::vector<Tensor> parameter_weights(const model::ParameterList& parameters,
                                      std::span<const GroupTensors> groups);

/// Sets the master weights to the (rounded) weights that the layers read, so that both
/// agree in the first step.
void initialize_master_weights(ops::Exec& exec, std::span<const GroupTensors> groups);

}  // namespace nrl::engine
