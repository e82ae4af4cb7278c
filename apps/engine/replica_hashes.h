#pragma once
// The tensors of an engine that several ranks hold with the same bits, and their hashes.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "apps/engine/engine.h"

namespace nrl::engine {

/// A weight, or a part of the optimizer state, on this rank between steps.
struct KeptTensor {
  std::string name;  ///< "model.norm.weight", "exp_avg/model.norm.weight"
  std::vector<Tensor> parts;
  bool on_host = false;                   ///< in memory::Tier::host
  std::vector<parallel::GroupId> groups;  ///< of several ranks; the members of each have the same bits
};

/// In an order that is the same on the members of each group. Scales of the optimizer state are tensors of
/// their group of parameters. The engine must outlive them.
std::vector<KeptTensor> kept_tensors(const Engine& engine);

/// A hash of each tensor (ops::AddHash), after the work enqueued so far. Not within a step; blocks. The
/// gathers of the last step must be finished (Engine::finish_gathers()).
std::vector<int64_t> hashes_of(Engine& engine, std::span<const KeptTensor> tensors);

}  // namespace nrl::engine
