#include "apps/model/program/recomputation.h"

namespace nrl::model {

using memory::SlotSet;

Recomputation::Recomputation(const Chunk& chunk) : layers_(chunk.size()) {
  for (size_t l = 0; l < chunk.size(); ++l) {
    const SlotSet own = chunk[l]->policy().recomputed();
    layers_[l].recomputed = own;
    if (l == 0) continue;
    const Ports &ports = chunk[l]->ports(), &below = chunk[l - 1]->ports();
    const SlotSet of_below = chunk[l - 1]->policy().recomputed();
    if ((below.out.bit() & of_below) != 0) layers_[l].recomputed |= ports.x.bit();
    if ((below.sum.bit() & of_below) != 0) layers_[l].recomputed |= ports.residual.bit();
  }
  for (size_t l = chunk.size(); l-- > 0;) {
    const Layer& layer = *chunk[l];
    SlotSet made = layers_[l].made, made_apart = made;
    auto& own = layers_[l].own;
    own[1] = steps_of_visit(layer, true, false, made_apart);
    own[2] = steps_of_visit(layer, false, true, made_apart);
    const uint64_t steps = own[3] = steps_of_visit(layer, true, true, made);
    if (l > 0) make(chunk, l - 1, behind(chunk, l, layer.table().reads_of(steps)), l);
    layers_[l].made = made;
    layers_[l].steps |= steps;
  }
}

uint64_t Recomputation::steps_of_visit(const Layer& layer, bool dgrad, bool wgrad, SlotSet& made) {
  uint64_t steps = 0;
  for (const memory::Step& step : layer.table().steps()) {
    if (!(step.pass == memory::Pass::data && dgrad) && !(step.pass == memory::Pass::weight && wgrad))
      continue;
    steps |= layer.policy().steps_for(step.reads, made);
    made |= step.remakes & layer.policy().recomputed();
  }
  return steps;
}

SlotSet Recomputation::behind(const Chunk& chunk, size_t layer, SlotSet ports) {
  const Ports &own = chunk[layer]->ports(), &below = chunk[layer - 1]->ports();
  return ((ports & own.x.bit()) != 0 ? below.out.bit() : 0) |
         ((ports & own.residual.bit()) != 0 ? below.sum.bit() : 0);
}

void Recomputation::make(const Chunk& chunk, size_t layer, SlotSet wanted, size_t top) {
  const memory::LayerPolicy& policy = chunk[layer]->policy();
  const uint64_t steps = policy.steps_for(wanted, layers_[layer].made);
  if (steps == 0) return;
  if (layer > 0) make(chunk, layer - 1, behind(chunk, layer, chunk[layer]->table().reads_of(steps)), top);
  layers_[top].before.push_back({static_cast<int>(layer), steps});
  layers_[layer].steps |= steps;
}

}  // namespace nrl::model
