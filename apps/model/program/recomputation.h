#pragma once
// Derives the steps that the backward pass of a chunk recomputes from the policies of its layers. Most run
// within the backward visit of a layer, right before the step that reads their output. A layer whose input is
// recomputed needs the output of the layer below, which may in turn need its own input recomputed: these
// layers run forward steps again in visits of their own before the backward visit, upwards from the first
// layer of the segment, whose input was kept.

#include <array>

#include "apps/model/program/layer.h"

namespace nrl::model {

class Recomputation {
 public:
  /// The layers' policies must not change any more.
  explicit Recomputation(const Chunk& chunk);

  /// Forward steps, as bits, that a layer runs again in a visit of its own.
  struct Visit {
    int layer = 0;
    uint64_t steps = 0;
  };
  /// The visits of lower layers before the backward visit of this one, in order; if dgrad and wgrad have
  /// visits of their own, before the dgrad visit.
  const std::vector<Visit>& before(size_t layer) const { return layers_[layer].before; }
  /// All forward steps that a layer runs again for a microbatch, as bits; some of them if parts of the
  /// backward pass are late.
  uint64_t steps(size_t layer) const { return layers_[layer].steps; }
  /// The forward steps that a backward visit of the layer with these parts runs again. If it has one part,
  /// the other has its own visit, dgrad first.
  uint64_t own_steps(size_t layer, bool dgrad, bool wgrad) const {
    return layers_[layer].own[(dgrad ? 1 : 0) + (wgrad ? 2 : 0)];
  }
  /// The slots that backward visits read from their recomputed buffers: slots of the layer's policy, and
  /// ports to recomputed slots of the layer below.
  memory::SlotSet recomputed(size_t layer) const { return layers_[layer].recomputed; }

  /// The slots of layer - 1 that a layer reads through these ports.
  static memory::SlotSet behind(const Chunk& chunk, size_t layer, memory::SlotSet ports);

 private:
  struct OfLayer {
    std::vector<Visit> before;
    uint64_t steps = 0;
    std::array<uint64_t, 4> own{};  // by part: dgrad + 2 wgrad
    memory::SlotSet recomputed = 0, made = 0;
  };
  /// The forward steps that a visit runs again; adds what they make to `made`.
  static uint64_t steps_of_visit(const Layer& layer, bool dgrad, bool wgrad, memory::SlotSet& made);
  /// Makes `wanted` of a layer for the backward visit of layer `top`.
  void make(const Chunk& chunk, size_t layer, memory::SlotSet wanted, size_t top);

  std::vector<OfLayer> layers_;
};

}  // namespace nrl::model
