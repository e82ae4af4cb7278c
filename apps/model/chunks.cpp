#include "apps/model/chunks.h"

#include "apps/model/layers/head.h"
#include "apps/model/layers/layers.h"
#include "core/base/error.h"

namespace nrl::model {
namespace {

std::unique_ptr<Layer> make_block(const LayerContext& context, int layer, const LayerParameters& parameters,
                                  const ChunkOptions& options, const Ports& below) {
  const ModelSpec& m = *context.spec;
  // Independent of the recompute policy, so that results are bitwise identical with and without it.
  const bool fuse_gelu = options.fuse_activation && has_fused_activation(m, options.device);
  auto block = std::make_unique<Block>(context, layer, parameters, options.recipe, fuse_gelu, below);
  const memory::SlotSet recomputed = options.recompute ? options.recompute(layer, block->table()) : 0;
  const memory::SlotSet offloaded = options.offload ? options.offload(layer, block->table()) : 0;
  block->recompute(recomputed, offloaded & ~recomputed);
  return block;
}

}  // namespace

bool has_fused_activation(const ModelSpec& spec, DeviceType device) {
  return device == DeviceType::cuda && !spec.gated && spec.activation == ops::Activation::gelu_tanh;
}

RecomputePolicy recompute_modules(std::vector<std::string> modules) {
  return [rule = RecomputeRule{.modules = std::move(modules)}](int, const memory::LayerTable& table) {
    return recomputed_slots(rule, table);
  };
}

RecomputePolicy recompute_by_block(std::vector<RecomputeRule> rules) {
  return [rules = std::move(rules)](int block, const memory::LayerTable& table) {
    return recomputed_slots(rules.at(static_cast<size_t>(block)), table);
  };
}

OffloadPolicy offload_by_block(std::vector<OffloadRule> rules) {
  return [rules = std::move(rules)](int block, const memory::LayerTable& table) {
    return offloaded_slots(rules.at(static_cast<size_t>(block)), table);
  };
}

std::vector<Chunk> decoder_chunks(const LayerContext& context, const ParameterList& parameters,
                                  const ChunkOptions& options) {
  const ModelLayout& layout = options.layout;
  std::vector<Chunk> chunks;
  for (int c = 0; c < layout.chunks; ++c) {
    Chunk& chunk = chunks.emplace_back();
    const int model_chunk = layout.model_chunk(c);
    const BlockRange blocks = chunk_blocks(layout, context.spec->layers, model_chunk);
    if (model_chunk == 0)
      chunk.push_back(std::make_unique<Embedding>(context, parameters, options.recipe));
    else
      chunk.push_back(std::make_unique<ChunkBegin>(context, options.recipe));
    for (int l = blocks.begin; l < blocks.end; ++l)
      chunk.push_back(make_block(context, l, parameters.layers[l], options, chunk.back()->ports()));
    const bool last = model_chunk + 1 == layout.model_chunks();
    if (last && context.spec->head == HeadKind::scalar)
      chunk.push_back(
          std::make_unique<ScoreHead>(context, parameters, options.recipe, chunk.back()->ports()));
    else if (last)
      chunk.push_back(std::make_unique<Head>(context, parameters, options.recipe, options.head_chunk_tokens,
                                             chunk.back()->ports()));
    else
      chunk.push_back(std::make_unique<ChunkEnd>(context, blocks.end - 1, options.recipe));
  }
  return chunks;
}

}  // namespace nrl::model
