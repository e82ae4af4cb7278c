#include "apps/model/spec/spec.h"

#include <algorithm>
#include <cmath>

#include <spdlog/fmt/fmt.h>

#include "core/base/text.h"
#include "core/ops/attention.h"
#include "core/ops/linear.h"

namespace nrl::model {

int64_t MoeSpec::capacity(int64_t tokens, bool generation) const {
  if (capacity_factor <= 0 || generation) return 0;
  const double even = static_cast<double>(tokens * rule.top_k) / static_cast<double>(experts);
  return std::max<int64_t>(1, static_cast<int64_t>(std::ceil(even * capacity_factor)));
}

int64_t MoeSpec::rows(int64_t tokens, bool generation) const {
  return pad_to_capacity && !generation ? experts * capacity(tokens, generation) : tokens * rule.top_k;
}

std::string_view MoeSpec::aux_name() const {
  constexpr std::string_view names[] = {"aux_loss", "seq_aux_loss", "global_aux_loss"};
  return names[static_cast<int>(aux_tokens)];
}

int64_t ModelSpec::expert_layers() const {
  int64_t count = 0;
  for (int64_t i = 0; i < layers; ++i) count += has_experts(i) ? 1 : 0;
  return count;
}

void use_scalar_head(ModelSpec& spec) {
  if (spec.head == HeadKind::scalar) return;
  spec.head = HeadKind::scalar;
  spec.new_head = true;
  spec.tied = false;
}

double approximate_parameters(const ModelSpec& m) {
  const auto n = [](int64_t x) { return static_cast<double>(x); };
  const double attention = n(m.hidden) * (n(m.heads) + 2 * n(m.kv_heads) + n(m.heads)) * n(m.head_dim);
  const double mlp = n(m.hidden) * n(m.ffn) * (m.gated ? 3 : 2);
  const double moe = 3 * n(m.hidden) * (n(m.moe.experts) * n(m.moe.ffn) + n(m.moe.shared_ffn)) +
                     n(m.hidden) * (n(m.moe.experts) + (m.moe.shared_gate ? 1 : 0));
  const double with_experts = n(m.expert_layers());
  return n(m.layers) * attention + (n(m.layers) - with_experts) * mlp + with_experts * moe +
         n(m.vocab_size) * n(m.hidden) * (m.tied || m.head == HeadKind::scalar ? 1 : 2) +
         (m.learned_positions ? n(m.max_positions) * n(m.hidden) : 0);
}

std::string_view head_text(const ModelSpec& m) {
  if (m.head == HeadKind::vocabulary) return m.tied ? " (tied)" : "";
  return m.new_head ? " (with a new scalar head)" : " (with a scalar head)";
}

std::string experts_text(const ModelSpec& m) {
  const MoeSpec& e = m.moe;
  if (e.experts == 0) return "";
  const double idle = 3.0 * static_cast<double>(m.expert_layers() * (e.experts - e.rule.top_k)) *
                      static_cast<double>(m.hidden * e.ffn);
  std::string text =
      fmt::format("{} in {} of {} layers, {} per token{}: {} active parameters", e.experts, m.expert_layers(),
                  m.layers, e.rule.top_k, e.shared_ffn > 0 ? " and a shared one" : "",
                  human_count(approximate_parameters(m) - idle));
  text += e.capacity_factor > 0
              ? fmt::format("   capacity {} x mean{}", e.capacity_factor, e.pad_to_capacity ? ", padded" : "")
              : "   no token dropped";
  if (e.rule.score == ops::RouterScore::sigmoid) text += "   sigmoid";
  if (e.rule.groups > 1) text += fmt::format("   {} of {} groups", e.rule.group_top_k, e.rule.groups);
  if (e.expert_bias) text += fmt::format("   bias rate {}", e.bias_rate);
  if (e.aux_loss > 0) text += fmt::format("   {} {}", e.aux_name(), e.aux_loss);
  if (e.z_loss > 0) text += fmt::format("   z_loss {}", e.z_loss);
  return text;
}

std::vector<ModelSize> unusual_sizes(const ModelSpec& m) {
  const auto size = [](std::string_view key, std::string_view alias, int64_t value, double published) {
    return ModelSize{
        .key = key, .alias = alias, .value = value, .ratio = static_cast<double>(value) / published};
  };
  std::vector<ModelSize> sizes{size("vocab_size", "", m.vocab_size, 262144),
                               size("hidden_size", "n_embd", m.hidden, 16384),
                               size("num_hidden_layers", "n_layer", m.layers, 128),
                               size("num_attention_heads", "n_head", m.heads, 128),
                               size("head_dim", "", m.head_dim, 256),
                               size("intermediate_size", "n_inner", m.ffn, 65536),
                               size("num_experts", "num_local_experts", m.moe.experts, 512)};
  std::stable_sort(sizes.begin(), sizes.end(),
                   [](const ModelSize& a, const ModelSize& b) { return a.ratio > b.ratio; });
  return sizes;
}

double training_flops_per_token(const ModelSpec& m, int64_t t) {
  return training_flops_of_token(m, attention_pairs(m, t) / static_cast<double>(t));
}

double attention_pairs(const ModelSpec& m, int64_t t) {
  double pairs = 0;
  for (const LayerKind& kind : m.layer_kinds) pairs += ops::attention_pairs(t, kind.window);
  return pairs / static_cast<double>(m.layers);
}

double training_flops_of_token(const ModelSpec& m, double keys) {
  const auto mlp = [&](int64_t ffn) {
    return ops::linear_flops(1, m.gated ? 2 * ffn : ffn, m.hidden) + ops::linear_flops(1, m.hidden, ffn);
  };
  const double attention = ops::linear_flops(1, m.qkv_width(), m.hidden) +
                           ops::linear_flops(1, m.hidden, m.q_width()) +
                           ops::attention_flops(1, m.heads, m.head_dim) * keys;
  const auto with_experts = static_cast<double>(m.expert_layers());
  // The experts that a token is sent to, the router, and the shared expert with its gate.
  const double moe = static_cast<double>(m.moe.rule.top_k) * mlp(m.moe.ffn) +
                     ops::linear_flops(1, m.moe.experts, m.hidden) + mlp(m.moe.shared_ffn) +
                     (m.moe.shared_gate ? ops::linear_flops(1, 1, m.hidden) : 0);
  return 3 * (static_cast<double>(m.layers) * attention +
              (static_cast<double>(m.layers) - with_experts) * mlp(m.ffn) + with_experts * moe +
              ops::linear_flops(1, m.head == HeadKind::scalar ? 1 : m.vocab_size, m.hidden)) -
         2 * m.trained.frozen_products + 3 * 2 * m.trained.adapter_products;
}

}  // namespace nrl::model
