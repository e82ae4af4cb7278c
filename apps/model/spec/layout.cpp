#include "apps/model/spec/layout.h"

#include <algorithm>

#include <spdlog/fmt/fmt.h>

#include "core/base/error.h"

namespace nrl::model {

Slice even_part(int64_t n, int64_t parts, int64_t i) {
  const int64_t begin = n * i / parts;
  return {begin, n * (i + 1) / parts - begin};
}

Slice tensor_slice(const ModelLayout& layout, int64_t n) {
  return even_part(n, layout.tensor, layout.tensor_rank);
}

namespace {

/// Blocks per stage if the split gives the number for the first or the last stage.
std::vector<int64_t> stage_sizes(const ModelLayout& layout, int64_t layers) {
  const BlockSplit& split = layout.split;
  const int64_t others = layout.stages - (split.first ? 1 : 0) - (split.last ? 1 : 0);
  const int64_t rest = layers - split.first.value_or(0) - split.last.value_or(0);
  std::vector<int64_t> sizes;
  int64_t next = 0;
  for (int stage = 0; stage < layout.stages; ++stage) {
    if (stage == 0 && split.first)
      sizes.push_back(*split.first);
    else if (stage + 1 == layout.stages && split.last)
      sizes.push_back(*split.last);
    else
      sizes.push_back(even_part(rest, others, next++).count);
  }
  return sizes;
}

/// Blocks per chunk of the model.
std::vector<int64_t> chunk_sizes(const ModelLayout& layout, int64_t layers) {
  const BlockSplit& split = layout.split;
  if (!split.chunks.empty()) return split.chunks;
  const int chunks = layout.model_chunks();
  std::vector<int64_t> sizes;
  if (split.first || split.last) {
    const std::vector<int64_t> stages = stage_sizes(layout, layers);
    for (int c = 0; c < chunks; ++c)
      sizes.push_back(even_part(stages[c % layout.stages], layout.chunks, c / layout.stages).count);
    return sizes;
  }
  const int64_t units = layers + (split.embedding ? 1 : 0) + (split.head ? 1 : 0);
  for (int c = 0; c < chunks; ++c) sizes.push_back(even_part(units, chunks, c).count);
  if (split.embedding) --sizes.front();
  if (split.head) --sizes.back();
  return sizes;
}

}  // namespace

std::string split_problem(const ModelLayout& layout, int64_t layers) {
  // Before sizes are made for what may be billions of chunks.
  const int64_t chunks = int64_t{layout.stages} * layout.chunks;
  if (chunks > layers + 2) return fmt::format("it has {} chunks for {} layers", chunks, layers);
  const std::vector<int64_t> sizes = chunk_sizes(layout, layers);
  if (static_cast<int>(sizes.size()) != layout.model_chunks())
    return fmt::format("it has {} numbers for {} chunks", sizes.size(), layout.model_chunks());
  int64_t sum = 0;
  for (size_t c = 0; c < sizes.size(); ++c) {
    const bool outer = layout.stages > 1 && (c == 0 || c + 1 == sizes.size());
    if (sizes[c] < (outer ? 0 : 1))
      return fmt::format("chunk {} of {} would have {} of the {} layers", c, sizes.size(), sizes[c], layers);
    sum += sizes[c];
  }
  return sum == layers ? "" : fmt::format("its chunks have {} layers, the model {}", sum, layers);
}

namespace {

BlockRange blocks_of(const std::vector<int64_t>& sizes, int model_chunk) {
  NRL_CHECK(model_chunk >= 0 && model_chunk < static_cast<int>(sizes.size()), "chunk {} of {}", model_chunk,
            sizes.size());
  int64_t begin = 0;
  for (int c = 0; c < model_chunk; ++c) begin += sizes[c];
  return {static_cast<int>(begin), static_cast<int>(begin + sizes[model_chunk])};
}

}  // namespace

BlockRange chunk_blocks(const ModelLayout& layout, int64_t layers, int model_chunk) {
  return blocks_of(chunk_sizes(layout, layers), model_chunk);
}

int64_t held_expert_layers(const ModelSpec& spec, const ModelLayout& layout, int64_t blocks) {
  const std::vector<bool> held = held_blocks(layout, spec.layers);
  int64_t layers = 0;
  for (int l = 0; l < static_cast<int>(blocks); ++l) layers += spec.has_experts(l) && held[l] ? 1 : 0;
  return layers;
}

std::vector<bool> held_blocks(const ModelLayout& layout, int64_t layers) {
  const std::vector<int64_t> sizes = chunk_sizes(layout, layers);
  std::vector<bool> held(static_cast<size_t>(layers));
  for (int c = 0; c < layout.chunks; ++c) {
    const BlockRange blocks = blocks_of(sizes, layout.model_chunk(c));
    std::fill(held.begin() + blocks.begin, held.begin() + blocks.end, true);
  }
  return held;
}

std::vector<ContextKind> context_kinds(const ModelSpec& spec, const ModelLayout& layout) {
  std::vector<ContextKind> out;
  for (size_t layer = 0; layer < layout.exchanges.size(); ++layer) {
    const ContextKind kind{layout.exchanges[layer], spec.window(static_cast<int64_t>(layer))};
    if (std::find(out.begin(), out.end(), kind) == out.end()) out.push_back(kind);
  }
  return out;
}

Slice local_experts(const ModelSpec& spec, const ModelLayout& layout) {
  const int64_t count = expert_shape(spec, layout).local();
  return {layout.expert_rank * count, count};
}

parallel::ExpertShape expert_shape(const ModelSpec& spec, const ModelLayout& layout) {
  NRL_CHECK(spec.moe.experts % layout.expert == 0, "{} experts on {} ranks", spec.moe.experts, layout.expert);
  return {.experts = spec.moe.experts, .ep = layout.expert, .etp = layout.expert_tensor};
}

ModelSpec tensor_part(const ModelSpec& spec, const ModelLayout& layout) {
  ModelSpec part = spec;
  for (int64_t* size : {&part.heads, &part.kv_heads, &part.ffn, &part.moe.shared_ffn}) {
    if (size == &part.ffn && spec.expert_layers() == spec.layers) continue;  // no layer has it
    NRL_CHECK(*size % layout.tensor == 0, "{} does not divide by {}", *size, layout.tensor);
    *size /= layout.tensor;
  }
  NRL_CHECK(part.moe.ffn % layout.expert_tensor == 0, "{} does not divide by {}", part.moe.ffn,
            layout.expert_tensor);
  part.moe.ffn /= layout.expert_tensor;
  return part;
}

}  // namespace nrl::model
