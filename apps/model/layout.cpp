#include "apps/model/layout.h"

#include <algorithm>

namespace nrl::model {

Slice tensor_slice(const ModelLayout& layout, int64_t n) {
  const int64_t begin = n * layout.tensor_rank / layout.tensor,
                end = n * (layout.tensor_rank + 1) / layout.tensor;
  return {begin, end - begin};
}

BlockRange chunk_blocks(const ModelLayout& layout, int64_t layers, int model_chunk) {
  const int chunks = layout.model_chunks();
  NRL_CHECK(model_chunk >= 0 && model_chunk < chunks, "chunk {} of {}", model_chunk, chunks);
  const auto boundary = [&](int chunk) { return static_cast<int>(layers * chunk / chunks); };
  return {boundary(model_chunk), boundary(model_chunk + 1)};
}

bool holds_block(const ModelLayout& layout, int64_t layers, int block) {
  for (int c = 0; c < layout.chunks; ++c) {
    const BlockRange blocks = chunk_blocks(layout, layers, layout.model_chunk(c));
    if (block >= blocks.begin && block < blocks.end) return true;
  }
  return false;
}

std::vector<parallel::ContextExchange> distinct_exchanges(const ModelLayout& layout) {
  std::vector<parallel::ContextExchange> out;
  for (const parallel::ContextExchange& exchange : layout.exchanges)
    if (std::find(out.begin(), out.end(), exchange) == out.end()) out.push_back(exchange);
  return out;
}

ModelSpec tensor_part(const ModelSpec& spec, const ModelLayout& layout) {
  ModelSpec part = spec;
  for (int64_t* size : {&part.heads, &part.kv_heads, &part.ffn}) {
    NRL_CHECK(*size % layout.tensor == 0, "{} does not divide by {}", *size, layout.tensor);
    *size /= layout.tensor;
  }
  return part;
}

}  // namespace nrl::model
