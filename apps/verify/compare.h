#pragma once
// Compares tensors of the ranks with those of a model on one rank, by logical tensor (Hugging Face name).

#include <string>
#include <string_view>
#include <vector>

#include "apps/engine/engine.h"
#include "parallel/comm/communicator.h"

namespace nrl::verify {

/// Elements [offset, offset + values.numel()) of a parameter in the memory of a rank.
struct Held {
  int parameter = 0;  ///< index into ParameterList::all
  int64_t offset = 0;
  Tensor values;
  /// True on exactly one of the ranks that hold these elements (plan::OwnedRange::counted).
  bool counted = false;
};

/// A rank's elements, with what is needed to read them.
struct HeldTensors {
  const model::ParameterList* parameters = nullptr;
  ops::Exec* exec = nullptr;
  std::vector<Held> all;
  bool trained_only = false;  ///< nothing of frozen parameters
};

/// The reduced gradients that a rank updates with. Valid while Engine::step() is in
/// StepInput::gradients_reduced.
HeldTensors held_gradients(engine::Engine& engine);
/// The weights that a rank keeps between steps, copies included. Waits for gathers in flight.
HeldTensors held_weights(engine::Engine& engine);

/// A logical tensor of all ranks against the reference. Equal on all ranks.
struct Difference {
  std::string name;
  int64_t numel = 0;
  /// ||x - x_ref||: of the elements of all ranks, each counted once, or of one rank's copy, whichever is
  /// greater. NaN if an element is.
  double norm = 0;
  double reference_norm = 0;  ///< ||x_ref||
  int rank = -1;              ///< whose elements differ most; -1: none differ
  int64_t unequal = 0;        ///< elements, of all copies, that are not bitwise equal
  int64_t counted = 0;        ///< elements that ranks count: equal to numel in a correct plan
};

/// Collective over `world`. `reference`: on rank 0 the tensors of the whole model in the order of `whole`,
/// whose elements are broadcast in blocks of at most 16 MiB; ignored on the other ranks. `mine`: this rank's.
std::vector<Difference> compare(comm::Communicator& world, const model::ParameterList& whole,
                                const HeldTensors* reference, const HeldTensors& mine);

}  // namespace nrl::verify
