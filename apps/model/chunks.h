#pragma once
// Builds the layers of a decoder, split into chunks of consecutive blocks.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "apps/model/program/layer.h"
#include "apps/model/spec/recompute_rule.h"
#include "precision/recipe.h"

namespace nrl::model {

/// The slots of block `block` that backward passes recompute.
using RecomputePolicy = std::function<memory::SlotSet(int block, const memory::LayerTable&)>;
/// The slots of block `block` that are moved to the host until the backward pass. Those that are recomputed
/// are not.
using OffloadPolicy = std::function<memory::SlotSet(int block, const memory::LayerTable&)>;
/// All slots with one of these rules, in all blocks.
RecomputePolicy recompute_modules(std::vector<std::string> modules);
/// A rule for every block of the model.
RecomputePolicy recompute_by_block(std::vector<RecomputeRule> rules);
OffloadPolicy offload_by_block(std::vector<OffloadRule> rules);

struct ChunkOptions {
  precision::Recipe recipe;
  DeviceType device = DeviceType::cpu;
  int64_t head_chunk_tokens = 1;   ///< tokens per chunk of the head
  ModelLayout layout = {};         ///< whose stage has the chunks
  RecomputePolicy recompute = {};  ///< empty: all activations are kept
  OffloadPolicy offload = {};      ///< empty: on the device
  bool fuse_activation = true;     ///< in the GEMMs that have it (has_fused_activation())
};

/// True if GEMMs on the device can compute the activation of the model's MLPs in their epilogues.
bool has_fused_activation(const ModelSpec& spec, DeviceType device);

/// All chunks of a stage, in the order of the forward pass; `context` and `parameters` must outlive them.
/// Only the first chunk of the model has the embedding, only the last one the head.
std::vector<Chunk> decoder_chunks(const LayerContext& context, const ParameterList& parameters,
                                  const ChunkOptions& options);

}  // namespace nrl::model
