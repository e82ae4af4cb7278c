#pragma once
// Which slots of a chunk are moved to the host after the forward pass, and which of them every backward visit
// needs back, from the policies of its layers. A recomputed step reads its inputs from the host like any
// other.

#include <array>
#include <vector>

#include "apps/model/program/recomputation.h"

namespace nrl::model {

class Offloading {
 public:
  /// The layers' policies must not change any more.
  Offloading(const Chunk& chunk, const Recomputation& recomputation);

  /// The slots of a layer that are moved to the host after its forward visit: its policy offloads them, and a
  /// backward visit uses them.
  memory::SlotSet of(size_t layer) const { return layers_[layer].offloaded; }
  /// Slots of a layer.
  struct Use {
    int layer = 0;
    memory::SlotSet slots = 0;
  };
  /// The offloaded slots that a backward visit with these parts uses, and the visits of lower layers before
  /// it (Recomputation::before()).
  const std::vector<Use>& uses(size_t layer, bool dgrad, bool wgrad) const {
    return layers_[layer].uses[(dgrad ? 1 : 0) + (wgrad ? 2 : 0)];
  }
  /// The slots of a layer that a backward pass with these parts uses in its first two visits (the head or the
  /// end of the chunk, then the last block). It needs them at once if it follows the forward pass.
  memory::SlotSet first_used(size_t layer, bool dgrad, bool wgrad) const;
  /// The ports through which a layer reads these slots of the layer below.
  static memory::SlotSet ports_of(const Chunk& chunk, size_t layer, memory::SlotSet below);

 private:
  struct OfLayer {
    memory::SlotSet offloaded = 0;
    std::array<std::vector<Use>, 4> uses;  // by part: dgrad + 2 wgrad
  };
  std::vector<OfLayer> layers_;
};

}  // namespace nrl::model
