#include "apps/plan/dry_rank.h"

#include <algorithm>

namespace nrl::plan {

ops::DryDevice usual_device(DeviceType type, int threads, const precision::Recipe& recipe,
                            ops::Bf16Products products) {
  if (type == DeviceType::cpu) return ops::DryDevice(threads, products);
  return {machine::usual_properties(recipe), {}, threads};
}

DryRank::DryRank(const PlannedRank& rank)
    : rank_(rank),
      device_(usual_device(rank.device, rank.partials, rank.recipe, rank.products)),
      exec_(device_.exec()) {
  memory::MemoryPlan inputs;
  BatchShape shape = rank.batch;
  shape.microbatches = 1;
  tensors_.emplace(inputs, shape);
  const ops::DryRun dry(exec_);
  tensors_->bind(inputs, memory::Arenas::nowhere(), exec_);
  if (!rank.group_ids.empty()) groups_.emplace(rank.grid, rank.group_ids, rank.channels, ledger_);
}

std::vector<model::ParameterView> DryRank::views() const {
  const memory::Arenas nowhere = memory::Arenas::nowhere();
  const auto at = [&](memory::BufferId id) { return static_cast<std::byte*>(nowhere.at({}, id)); };
  std::vector<model::ParameterView> views(rank_.parameters.all.size());
  for (const ParamGroup& g : rank_.groups)
    for (const int p : g.parameters) {
      const model::Parameter& parameter = rank_.parameters.all[p];
      model::ParameterView& view = views[p];
      view.weight = parameter.view(at(g.weights), g.read_type());
      if (g.trainable) view.grad = parameter.view(at(g.gradients), g.gradient);
    }
  return views;
}

size_t needed_workspace(const PlannedRank& rank) {
  DryRank dry(rank);
  const size_t passes =
      rank.decoder.needed_workspace(dry.exec(), dry.views(), dry.microbatch(), dry.groups());
  const ops::DryRun update(dry.exec());
  double norm = 0;
  for (const ParamGroup& g : rank.groups)
    if (g.trainable)
      add_squared_norm(dry.exec(), g, make_tensor(&norm, g.main_gradient, {g.gradient_elements()}),
                       make_tensor(&norm, DType::f64, {1}));
  return std::max(passes, update.workspace());
}

}  // namespace nrl::plan
