#include "apps/model/workspace.h"

#include <algorithm>
#include <array>

#include "core/ops/kernel_table.h"

namespace nrl::model {
namespace {

int64_t widest_projection(const ModelSpec& m) {
  return std::max(
      {m.hidden, m.qkv_width(), m.mlp_in_width(), m.head_dim, m.moe.experts, 2 * m.moe.shared_ffn});
}

/// CPU workspace of a layer with experts, for `rows` dispatched rows and n tokens; its attention GEMMs are
/// counted with the dense layers.
size_t experts_workspace(const ModelSpec& m, int64_t n, int64_t rows, DType dtype, int threads,
                         ops::Bf16Products products) {
  if (m.moe.experts == 0) return 0;
  const auto linear = [&](int64_t out, int64_t in) {
    return ops::linear_workspace(n, out, in, dtype, threads, products);
  };
  const auto grouped = [&](int64_t out, int64_t in) {
    return ops::grouped_linear_workspace(rows, out, in, dtype, threads, products);
  };
  size_t bytes = std::max({linear(m.moe.experts, m.hidden), grouped(2 * m.moe.ffn, m.hidden),
                           grouped(m.hidden, m.moe.ffn), ops::router_workspace(threads)});
  if (m.moe.shared_ffn > 0)
    bytes = std::max({bytes, linear(2 * m.moe.shared_ffn, m.hidden), linear(m.hidden, m.moe.shared_ffn),
                      linear(1, m.hidden)});
  return bytes;
}

size_t needed_gpu_workspace(const ModelSpec& m, const TrainingSizes& o) {
  return std::max({o.optimizer_workspace, ops::norm_backward_workspace(m.hidden, o.partials),
                   ops::qk_norm_rope_workspace(m.head_dim, o.partials),
                   ops::gpu_linear_workspace(widest_projection(m), o.partials),
                   ops::embedding_backward_workspace(o.tokens, m.hidden), ops::router_workspace(o.partials),
                   ops::attention_gpu_workspace(o.tokens, m.heads, m.kv_heads, m.head_dim,
                                                o.recipe.quantized().attention)});
}

}  // namespace

size_t training_workspace(const ModelSpec& m, const TrainingSizes& o) {
  if (o.device == DeviceType::cuda) return needed_gpu_workspace(m, o);
  const int64_t chunk = o.head_chunk;
  const DType dtype = o.recipe.activations();
  size_t bytes = std::max(ops::norm_backward_workspace(std::max(m.hidden, m.head_dim), o.partials),
                          experts_workspace(m, o.tokens, o.routed, dtype, o.partials, o.products));
  auto linear = [&](int64_t n, int64_t out, int64_t in) {
    bytes = std::max(bytes, ops::linear_workspace(n, out, in, dtype, o.partials, o.products));
  };
  if (o.recipe.quantizes_any()) {
    const auto fp8 = [&](int64_t out, int64_t in) {
      for (const auto& [a, b, c] : {std::array{o.tokens, out, in}, {o.tokens, in, out}, {out, in, o.tokens}})
        bytes = std::max(bytes, ops::linear_workspace(a, b, c, DType::e4m3, o.partials, o.products));
    };
    const auto fp8_experts = [&](int64_t out, int64_t in) {
      // The rows of an expert may be padded with zeros.
      const int64_t rows = o.routed + row_unit(o.recipe.quantized().input.scaling);
      for (const auto& [a, b, c] : {std::array{rows, out, in}, {rows, in, out}, {out, in, rows}})
        bytes = std::max(bytes, ops::grouped_linear_workspace(a, b, c, DType::e4m3, o.partials, o.products));
    };
    fp8(m.qkv_width(), m.hidden);
    fp8(m.hidden, m.q_width());
    fp8(m.mlp_in_width(), m.hidden);
    fp8(m.hidden, m.ffn);
    if (m.moe.experts > 0) {
      fp8_experts(2 * m.moe.ffn, m.hidden);
      fp8_experts(m.hidden, m.moe.ffn);
    }
    if (m.moe.shared_ffn > 0) {
      fp8(2 * m.moe.shared_ffn, m.hidden);
      fp8(m.hidden, m.moe.shared_ffn);
    }
  }
  for (const int64_t rows : o.gemm_rows) {
    linear(rows, m.qkv_width(), m.hidden);
    linear(rows, m.hidden, m.q_width());
    linear(rows, m.mlp_in_width(), m.hidden);
    linear(rows, m.hidden, m.ffn);
  }
  linear(chunk, m.vocab_size, m.hidden);
  if (o.tokens % chunk) linear(o.tokens % chunk, m.vocab_size, m.hidden);
  return std::max(
      bytes, ops::attention_workspace(o.tokens, m.heads, m.kv_heads, m.head_dim, o.max_sequence, o.partials));
}

size_t generation_workspace(const ModelSpec& m, const precision::Recipe& recipe, int64_t tokens,
                            int64_t max_tokens, DeviceType device, int partials, ops::Bf16Products products) {
  if (device == DeviceType::cuda)
    return std::max(ops::gpu_linear_workspace(widest_projection(m), partials),
                    ops::attention_gpu_workspace(max_tokens, m.heads, m.kv_heads, m.head_dim));
  size_t bytes = std::max(
      ops::attention_workspace(tokens, m.heads, m.kv_heads, m.head_dim, max_tokens, partials),
      experts_workspace(m, tokens, m.moe.rows(tokens, true), recipe.activations(), partials, products));
  auto linear = [&](int64_t n, int64_t out, int64_t in) {
    bytes = std::max(bytes, ops::linear_workspace(n, out, in, recipe.activations(), partials, products));
  };
  linear(tokens, m.qkv_width(), m.hidden);
  linear(tokens, m.hidden, m.q_width());
  linear(tokens, m.mlp_in_width(), m.hidden);
  linear(tokens, m.hidden, m.ffn);
  linear(1, m.vocab_size, m.hidden);
  return bytes;
}

}  // namespace nrl::model
