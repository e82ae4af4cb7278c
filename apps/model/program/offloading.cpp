#include "apps/model/program/offloading.h"

#include <map>

namespace nrl::model {

using memory::SlotSet;

Offloading::Offloading(const Chunk& chunk, const Recomputation& recomputation) : layers_(chunk.size()) {
  for (size_t l = 0; l < chunk.size(); ++l)
    for (size_t parts = 1; parts < 4; ++parts) {
      const bool dgrad = (parts & 1) != 0, wgrad = (parts & 2) != 0;
      std::map<int, SlotSet> used;
      const auto add = [&](size_t layer, SlotSet slots) {
        used[static_cast<int>(layer)] |= slots & chunk[layer]->policy().offloaded();
        if (layer > 0)
          used[static_cast<int>(layer) - 1] |=
              Recomputation::behind(chunk, layer, slots) & chunk[layer - 1]->policy().offloaded();
      };
      // A step that runs again writes slots that were kept as well.
      const auto add_again = [&](size_t layer, uint64_t steps) {
        const memory::LayerTable& table = chunk[layer]->table();
        add(layer, table.reads_of(steps) | table.writes_of(steps));
      };
      for (const memory::Step& step : chunk[l]->table().steps())
        if ((step.pass == memory::Pass::data && dgrad) || (step.pass == memory::Pass::weight && wgrad))
          add(l, step.reads);
      add_again(l, recomputation.own_steps(l, dgrad, wgrad));
      if (dgrad)
        for (const Recomputation::Visit& again : recomputation.before(l))
          add_again(static_cast<size_t>(again.layer), again.steps);
      for (const auto& [layer, slots] : used) {
        if (slots == 0) continue;
        layers_[l].uses[parts].push_back({layer, slots});
        layers_[static_cast<size_t>(layer)].offloaded |= slots;
      }
    }
}

SlotSet Offloading::first_used(size_t layer, bool dgrad, bool wgrad) const {
  SlotSet slots = 0;
  for (size_t l = layers_.size(); l > 0 && l + 2 > layers_.size(); --l)
    for (const Use& use : uses(l - 1, dgrad, wgrad))
      if (use.layer == static_cast<int>(layer)) slots |= use.slots;
  return slots;
}

SlotSet Offloading::ports_of(const Chunk& chunk, size_t layer, SlotSet below) {
  if (layer == 0) return 0;
  const Ports &own = chunk[layer]->ports(), &other = chunk[layer - 1]->ports();
  return ((below & other.out.bit()) != 0 ? own.x.bit() : 0) |
         ((below & other.sum.bit()) != 0 ? own.residual.bit() : 0);
}

}  // namespace nrl::model
