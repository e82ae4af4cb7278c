#pragma once
// Which layers a decoder has, cut into chunks of consecutive blocks.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "apps/model/layer.h"
#include "precision/recipe.h"

namespace nrl::model {

using Chunk = std::vector<std::unique_ptr<Layer>>;

/// The slots of block number `block` that backward passes make again.
using RecomputePolicy = std::function<memory::SlotSet(int block, const memory::LayerTable&)>;
/// All slots with one of these rules, in all blocks. Fails (78) when one names no slot of the model.
RecomputePolicy recompute_modules(std::vector<std::string> modules);

struct ChunkOptions {
  precision::Recipe recipe;
  DeviceType device = DeviceType::cpu;
  int64_t head_chunk_tokens = 1;   ///< whose logits exist at a time
  int chunks = 1;                  ///< at most as many as blocks, which are shared out evenly
  RecomputePolicy recompute = {};  ///< none: everything is kept
};

/// All chunks of a model, in its order; `context` and `parameters` outlive them.
std::vector<Chunk> decoder_chunks(const LayerContext& context, const ParameterList& parameters,
                                  const ChunkOptions& options);

}  // namespace nrl::model
