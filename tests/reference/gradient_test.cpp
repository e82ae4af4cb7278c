// The reference itself: its hand-written backward pass against finite differences of its forward pass.

#include <algorithm>
#include <cmath>

#include "tests/catch.h"
#include "tests/reference/decoder.h"

using namespace reference;

namespace {

Config family(const std::string& name) {
  Config c;
  c.family = name;
  c.vocab_size = 11;
  c.hidden = 6;
  c.layers = 2;
  c.heads = 4;
  c.kv_heads = 2;
  c.head_dim = 4;
  c.ffn = 5;
  c.positions = 16;
  c.norm_eps = 1e-3;
  c.activation = "silu";
  c.rope.rotary_dim = 4;
  if (name == "gpt2") {
    c.kv_heads = 4;
    c.hidden = 16;
    c.activation = "gelu_tanh";
    c.tied = c.qkv_bias = c.o_bias = c.mlp_bias = true;
  }
  if (name == "llama") {
    c.activation = "gelu_erf";
    c.qkv_bias = c.o_bias = c.mlp_bias = true;
    c.rope.type = "yarn";
    c.rope.factor = 4;
    c.rope.original_max_position = 8;
  }
  if (name == "mistral") c.window = 3;
  if (name == "qwen2") c.tied = c.qkv_bias = true;
  if (name == "qwen3") {
    c.qk_norm = true;
    c.rope.rotary_dim = 2;
  }
  if (name == "gemma3_text") {
    c.qk_norm = c.tied = true;
    c.activation = "gelu_tanh";
    c.layers = 3;
    c.window = 3;
    c.period = 3;
    c.query_scalar = 6;
    c.local_rope = c.rope;
    c.local_rope.theta = 10;
    c.rope.type = "linear";
    c.rope.factor = 8;
  }
  if (name == "mixtral")
    c.experts = {.count = 4, .chosen = 2, .ffn = 3, .normalize = true, .dense = {false, false}};
  if (name == "qwen2_moe")
    c.experts = {.count = 5,
                 .chosen = 2,
                 .ffn = 3,
                 .shared_ffn = 4,
                 .dense = {false, true},
                 .aux_loss = 0.8,
                 .z_loss = 0.3};
  return c;
}

Tensors random_weights(const Config& c) {
  Tensors all = shapes(c);
  double x = 0.3;
  for (auto& [name, t] : all)
    for (double& value : t.values) {
      x = 3.9 * x * (1 - x);  // the logistic map: chaotic in (0, 1)
      value = x - 0.4;
    }
  return all;
}

}  // namespace

TEST_CASE("the backward pass agrees with finite differences", "[reference]") {
  const std::string name = GENERATE(as<std::string>{}, "gpt2", "llama", "mistral", "qwen2", "qwen3",
                                    "mixtral", "qwen2_moe", "gemma3_text");
  const Config c = family(name);
  Tensors w = random_weights(c);
  const Tokens tokens{3, 7, 7, 0, 10, 1, 5}, targets{7, 7, 0, -1, 1, 5, 2};
  Tensors gradients = zeros_like(w);
  const double scale = 0.7;
  // One document; and three, with positions that begin again in the third one only.
  const Layout layout =
      GENERATE(values<Layout>({Layout{}, Layout{{0, 1, 2, 3, 0, 1, 2}, {0, 0, 2, 2, 4, 4, 4}}}));
  const double router_scale = 1.3;
  REQUIRE(loss_and_gradient(c, w, tokens, targets, scale, gradients, layout, router_scale) ==
          Approx(loss(c, w, tokens, targets, layout)));
  const auto total = [&] {
    return scale * loss(c, w, tokens, targets, layout) + router_scale * router_losses(c, w, tokens, layout);
  };
  for (auto& [tensor, t] : w) {
    double largest = 0;
    for (const double g : gradients.at(tensor).values) largest = std::max(largest, std::abs(g));
    for (size_t i = 0; i < t.size(); i += 1 + t.size() / 12) {
      const double h = 1e-5, at = t[i];
      t[i] = at + h;
      const double above = total();
      t[i] = at - h;
      const double below = total();
      t[i] = at;
      INFO(name << " " << tensor << "[" << i << "]");
      REQUIRE(gradients.at(tensor)[i] == Approx((above - below) / (2 * h)).margin(1e-7 + 1e-7 * largest));
    }
  }
}

TEST_CASE("greedy decoding takes the likeliest token each time", "[reference]") {
  const Config c = family("qwen3");
  const Tensors w = random_weights(c);
  const Tokens text = greedy(c, w, {1, 2}, 3);
  REQUIRE(text.size() == 5);
  for (size_t t = 2; t < 5; ++t) {
    const Tensor y = logits(c, w, Tokens(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(t)));
    for (size_t i = 0; i < c.vocab_size; ++i) REQUIRE(y(t - 1, static_cast<size_t>(text[t])) >= y(t - 1, i));
  }
}

TEST_CASE("documents that do not see each other have the loss that they have alone", "[reference]") {
  const std::string name = GENERATE(as<std::string>{}, "gpt2", "llama", "mistral", "qwen2", "qwen3");
  Config c = family(name);
  c.rope.type = "default";
  const Tensors w = random_weights(c);
  const Tokens a{3, 7, 7, 0}, b{10, 1, 5}, targets_a{7, 7, 0, 2}, targets_b{1, 5, 2};
  const Tokens both{3, 7, 7, 0, 10, 1, 5}, targets{7, 7, 0, 2, 1, 5, 2};
  const double apart = loss(c, w, a, targets_a) + loss(c, w, b, targets_b);
  REQUIRE(loss(c, w, both, targets, {{0, 1, 2, 3, 0, 1, 2}, {0, 0, 0, 0, 4, 4, 4}}) ==
          Approx(apart).epsilon(1e-12));
  REQUIRE(loss(c, w, both, targets) != Approx(apart).epsilon(1e-4));
}
