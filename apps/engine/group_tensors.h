#pragma once
// The tensors behind the parameter groups of a plan: in the memory of the device, or in a copy on the host.

#include <span>
#include <string_view>
#include <vector>

#include "apps/model/layer.h"
#include "apps/plan/param_groups.h"
#include "core/ops/exec.h"
#include "memory/plan.h"

namespace nrl::engine {

/// The flat tensors of a group. The group outlives them.
struct GroupTensors {
  const plan::ParamGroup* group = nullptr;
  Tensor weights;             ///< (layout.total()) what the layers read
  Tensor gradients;           ///< (layout.total()) f32; empty where frozen
  std::vector<Tensor> state;  ///< (state_elements()) each, as ParamGroup::state
  Tensor chunks;              ///< (C, 4) i64, the group's chunk_table; empty where frozen

  /// A tensor of the state by its name; empty when there is none.
  Tensor find(std::string_view name) const;
};

/// The groups in the memory of a solved plan, with their chunk tables filled in.
std::vector<GroupTensors> bind_groups(std::span<const plan::ParamGroup> groups,
                                      const memory::MemoryPlan& plan, const memory::Arenas& arenas,
                                      ops::Exec& exec);

/// Every parameter's weight and gradient in the groups' tensors, indexed like ParameterList::all. A frozen
/// parameter has no gradient.
std::vector<model::ParameterView> parameter_views(const model::ParameterList& parameters,
                                                  std::span<const GroupTensors> groups);
/// Its weights alone.
std::vector<Tensor> parameter_weights(const model::ParameterList& parameters,
                                      std::span<const GroupTensors> groups);

/// Master weights from the rounded weights that the layers read, so that the first step sees what they see.
void start_masters(ops::Exec& exec, std::span<const GroupTensors> groups);

}  // namespace nrl::engine
