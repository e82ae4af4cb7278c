#include "apps/engine/group_reducer.h"

#include "core/base/error.h"

namespace nrl::engine {

GroupReducer::GroupReducer(std::span<const GroupTensors> groups, const parallel::Groups& ranks, bool overlap,
                           comm::StreamRef stream) {
  for (const GroupTensors& tensors : groups) {
    const plan::ParamGroup& g = *tensors.group;
    if (!g.trainable) continue;
    const std::span<float> gradients(tensors.gradients.ptr<float>(), static_cast<size_t>(g.layout.total()));
    for (size_t p = 0; p < g.parameters.size(); ++p) {
      const auto parameter = static_cast<size_t>(g.parameters[p]);
      if (locations_.size() <= parameter) locations_.resize(parameter + 1);
      locations_[parameter] = {static_cast<int>(groups_.size()), static_cast<int>(p)};
    }
    groups_.push_back({std::make_unique<parallel::GradReducer>(g.layout, gradients, ranks[g.reduce],
                                                               g.strategy, overlap, stream),
                       tensors.weights});
  }
}

void GroupReducer::start() {
  for (Group& g : groups_) g.reducer->start();
}

void GroupReducer::ready(int parameter) {
  const auto p = static_cast<size_t>(parameter);
  NRL_CHECK(p < locations_.size() && locations_[p].group >= 0, "parameter {} is not trained", parameter);
  groups_[static_cast<size_t>(locations_[p].group)].reducer->ready(locations_[p].index);
}

void GroupReducer::finish() {
  for (Group& g : groups_) g.reducer->finish();
}

void GroupReducer::start_gather() {
  for (Group& g : groups_)
    g.reducer->start_gather(comm::View(g.weights.data, g.weights.numel(), g.weights.dtype));
}

void GroupReducer::wait_gather(int parameter) {
  const auto p = static_cast<size_t>(parameter);
  if (p >= locations_.size() || locations_[p].group < 0) return;  // frozen
  groups_[static_cast<size_t>(locations_[p].group)].reducer->wait_gather(locations_[p].index);
}

void GroupReducer::wait_gathers() {
  for (Group& g : groups_) g.reducer->wait_gathers();
}

}  // namespace nrl::engine
