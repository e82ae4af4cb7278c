#include "apps/model/spec.h"

#include <algorithm>
#include <cmath>

#include "core/ops/attention.h"
#include "core/ops/linear.h"

namespace nrl::model {

std::string_view name_of(Family f) {
  for (const auto& [name, family] : families)
    if (family == f) return name;
  return "?";
}

double approximate_parameters(const ModelSpec& m) {
  const auto n = [](int64_t x) { return static_cast<double>(x); };
  const double layer = n(m.hidden) * (n(m.heads) + 2 * n(m.kv_heads) + n(m.heads)) * n(m.head_dim) +
                       n(m.hidden) * n(m.ffn) * (m.gated ? 3 : 2);
  return n(m.layers) * layer + n(m.vocab_size) * n(m.hidden) * (m.tied ? 1 : 2) +
         (m.learned_positions ? n(m.max_positions) * n(m.hidden) : 0);
}

ModelSize most_unusual_size(const ModelSpec& m) {
  const auto size = [](std::string_view key, std::string_view gpt2_key, int64_t value, double published) {
    return ModelSize{
        .key = key, .gpt2_key = gpt2_key, .value = value, .ratio = static_cast<double>(value) / published};
  };
  const ModelSize sizes[] = {size("vocab_size", "", m.vocab_size, 262144),
                             size("hidden_size", "n_embd", m.hidden, 16384),
                             size("num_hidden_layers", "n_layer", m.layers, 128),
                             size("num_attention_heads", "n_head", m.heads, 128),
                             size("head_dim", "", m.head_dim, 256),
                             size("intermediate_size", "n_inner", m.ffn, 65536)};
  return *std::max_element(std::begin(sizes), std::end(sizes),
                           [](const ModelSize& a, const ModelSize& b) { return a.ratio < b.ratio; });
}

double training_flops_per_token(const ModelSpec& m, int64_t t) {
  return training_flops_of_token(m, ops::attention_pairs(t, m.window) / static_cast<double>(t));
}

double training_flops_of_token(const ModelSpec& m, double keys) {
  const double matrices =
      ops::linear_flops(1, m.qkv_width(), m.hidden) + ops::linear_flops(1, m.hidden, m.q_width()) +
      ops::linear_flops(1, m.mlp_in_width(), m.hidden) + ops::linear_flops(1, m.hidden, m.ffn);
  const double attention = ops::attention_flops(1, m.heads, m.head_dim) * keys;
  return 3 * (static_cast<double>(m.layers) * (matrices + attention) +
              ops::linear_flops(1, m.vocab_size, m.hidden));
}

}  // namespace nrl::model
