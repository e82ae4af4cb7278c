#pragma once
// Which layers a decoder has, cut into chunks of consecutive blocks.

#include <memory>
#include <string>
#include <vector>

#include "apps/model/layer.h"

namespace nrl::model {

using Chunk = std::vector<std::unique_ptr<Layer>>;

struct ChunkOptions {
  DType dtype = DType::f32;            ///< of activations
  DType logits_gradient = DType::f32;  ///< dtype of the gradient of the logits
  DeviceType device = DeviceType::cpu;
  int64_t head_chunk_tokens = 1;  ///< whose logits exist at a time
  int chunks = 1;                 ///< at most as many as blocks, which are shared out evenly
  /// Rules of slots that blocks make again in the backward pass: "norm", "activation".
  std::vector<std::string> recompute_modules = {};
};

/// All chunks of a model, in its order; `context` and `parameters` outlive them. Fails (78) when a recompute
/// module names no slot of this model.
std::vector<Chunk> decoder_chunks(const LayerContext& context, const ParameterList& parameters,
                                  const ChunkOptions& options);

}  // namespace nrl::model
