// What recipes say about each operand, and which of them the ops refuse.

#include "precision/recipe.h"

#include <set>
#include <vector>

#include "core/base/error.h"
#include "tests/catch.h"

namespace nrl::precision {
namespace {

/// e4m3 values and e5m2 gradients with tensor scales in layers 1 and 2.
constexpr Recipe hybrid{RecipeFormats{
    .weights = DType::bf16,
    .activations = DType::bf16,
    .gradients = DType::bf16,
    .logits_gradient = DType::bf16,
    .quantized = {.input = {DType::e4m3, Scaling::tensor},
                  .weight = {DType::e4m3, Scaling::tensor},
                  .gradient = {DType::e5m2, Scaling::tensor},
                  .begin = 1,
                  .end = 3,
                  .amax_history = 16},
}};
/// Blocks have scales of their own, which no step keeps.
constexpr Recipe blockwise{RecipeFormats{
    .weights = DType::bf16,
    .activations = DType::bf16,
    .gradients = DType::bf16,
    .quantized = {.input = {DType::e4m3, Scaling::row128},
                  .weight = {DType::e4m3, Scaling::block128},
                  .gradient = {DType::e4m3, Scaling::row128},
                  .end = 4},
}};

TEST_CASE("recipes of one format", "[precision]") {
  for (const Gemm gemm : layer_gemms)
    for (const Role role : all_roles) {
      REQUIRE(float32.of(0, gemm, role) == Format{DType::f32, Scaling::none});
      REQUIRE(bfloat16.of(7, gemm, role) == Format{DType::bf16, Scaling::none});
    }
  REQUIRE_FALSE(float32.master_weights());
  REQUIRE(bfloat16.master_weights() == DType::f32);
  REQUIRE(bfloat16.of(0, Gemm::lm_head, Role::gradient).dtype == DType::bf16);
  REQUIRE(bfloat16_storage.of(0, Gemm::lm_head, Role::gradient).dtype == DType::f32);
  REQUIRE(bfloat16_storage.of(0, Gemm::lm_head, Role::input).dtype == DType::bf16);
  REQUIRE(bfloat16.scales(32).bytes() == 0);
  REQUIRE(bfloat16.logits() == DType::f32);
  const Recipe low = bfloat16_storage.with_bf16_logits();
  REQUIRE(low.logits() == DType::bf16);
  REQUIRE(low.of(0, Gemm::lm_head, Role::gradient).dtype == DType::bf16);
  REQUIRE(unsupported_reason(low, 32).empty());
  REQUIRE(float16.master_weights() == DType::f32);
  REQUIRE(float16.of(0, Gemm::lm_head, Role::gradient).dtype == DType::f16);
  REQUIRE(float16_storage.of(0, Gemm::lm_head, Role::gradient).dtype == DType::f32);
  REQUIRE(float16.logits() == DType::f32);
  for (const Recipe& recipe : {float32, bfloat16, bfloat16_storage, float16, float16_storage})
    REQUIRE(unsupported_reason(recipe, 32).empty());
  REQUIRE(recipe_for_weights(DType::f32) == float32);
  REQUIRE(recipe_for_weights(DType::bf16) == bfloat16);
  REQUIRE_THROWS_AS(recipe_for_weights(DType::f16), Error);
}

TEST_CASE("layers with quantized operands", "[precision]") {
  REQUIRE(hybrid.of(0, Gemm::qkv, Role::input) == Format{DType::bf16, Scaling::none});
  REQUIRE(hybrid.of(1, Gemm::qkv, Role::input) == Format{DType::e4m3, Scaling::tensor});
  REQUIRE(hybrid.of(2, Gemm::mlp_out, Role::gradient) == Format{DType::e5m2, Scaling::tensor});
  REQUIRE(hybrid.of(3, Gemm::mlp_out, Role::gradient) == Format{DType::bf16, Scaling::none});
  REQUIRE(hybrid.of(2, Gemm::lm_head, Role::weight) == Format{DType::bf16, Scaling::none});
  REQUIRE(hybrid.weights() == DType::bf16);
  REQUIRE(blockwise.of(3, Gemm::o_proj, Role::weight) == Format{DType::e4m3, Scaling::block128});
}

TEST_CASE("operands of attention", "[precision]") {
  QuantizedGemms q = hybrid.quantized();
  q.attention = true;
  const Recipe recipe = bfloat16.with_quantized(q);
  REQUIRE(unsupported_reason(recipe, 4).empty());
  REQUIRE(recipe.of(1, Gemm::attention_k, Role::input) == Format{DType::e4m3, Scaling::tensor});
  REQUIRE(recipe.of(2, Gemm::attention_out, Role::gradient) == Format{DType::e5m2, Scaling::tensor});
  REQUIRE(recipe.quantizes_attention(1));
  REQUIRE_FALSE(recipe.quantizes_attention(0));
  REQUIRE_FALSE(hybrid.quantizes_attention(1));
  REQUIRE(recipe.of(1, Gemm::lm_head, Role::input).scaling == Scaling::none);
  // Every operand of a layer has a place of its own.
  for (const bool experts : {false, true}) {
    const ScaleLayout scales = recipe.scales(4, experts);
    REQUIRE(scales.operands() == hybrid.scales(4, experts).operands() + 3 * 4 * 4);
    std::vector<Gemm> gemms(layer_gemms.begin(), layer_gemms.end());
    if (experts) gemms.insert(gemms.end(), expert_gemms.begin(), expert_gemms.end());
    gemms.insert(gemms.end(), attention_operands.begin(), attention_operands.end());
    std::set<int> places;
    for (int layer = 0; layer < 4; ++layer)
      for (const Gemm gemm : gemms)
        for (const Role role : all_roles) {
          const int place = scales.index(layer, gemm, role);
          REQUIRE(place >= 0);
          REQUIRE(place < scales.operands());
          REQUIRE(places.insert(place).second);
        }
  }
  q.gradient.dtype = DType::e4m3;
  REQUIRE_FALSE(unsupported_reason(bfloat16.with_quantized(q), 4).empty());
  q = blockwise.quantized();
  q.attention = true;
  REQUIRE_FALSE(unsupported_reason(bfloat16.with_quantized(q), 4).empty());
  REQUIRE(fp8_gemms({.end = 2, .attention = true}).attention);
}

TEST_CASE("scales that outlive a step", "[precision]") {
  const ScaleLayout scales = hybrid.scales(4);
  REQUIRE(scales.operands() == 4 * 4 * 3);
  REQUIRE(scales.history == 16);
  REQUIRE(scales.bytes() == 48 * (17 + aligned_scale) * 4);
  REQUIRE(scales.index(0, Gemm::qkv, Role::input) == 0);
  REQUIRE(scales.index(3, Gemm::mlp_out, Role::weight) == 31);
  REQUIRE(scales.index(0, Gemm::o_proj, Role::gradient) == 33);
  const ScaleLayout experts = hybrid.scales(4, true);
  REQUIRE(experts.operands() == 4 * 8 * 3);
  REQUIRE(experts.index(3, Gemm::shared_out, Role::weight) == 63);
  REQUIRE(hybrid.of(1, Gemm::experts_out, Role::input) == Format{DType::e4m3, Scaling::tensor});
  REQUIRE(hybrid.scales(1).bytes() == 0);  // its only layer is not quantized
  REQUIRE(blockwise.scales(4).bytes() == 0);
}

TEST_CASE("FP8 recipes by name", "[precision]") {
  const QuantizedGemms delayed = fp8_gemms(
      {.recipe = Fp8Recipe::delayed, .end = 4, .amax_history = 8, .most_recent = true, .margin = 1});
  REQUIRE(delayed.amax_history == 8);
  REQUIRE(delayed.most_recent);
  REQUIRE(delayed.margin == 1);
  REQUIRE(delayed.gradient == Format{DType::e5m2, Scaling::tensor});
  REQUIRE(delayed.weight == Format{DType::e4m3, Scaling::tensor});
  const QuantizedGemms current = fp8_gemms({.hybrid = false, .end = 4, .amax_history = 8});
  REQUIRE(current.amax_history == 0);
  REQUIRE(current.gradient == Format{DType::e4m3, Scaling::tensor});
  REQUIRE(fp8_gemms({.recipe = Fp8Recipe::blockwise, .end = 4}) == blockwise.quantized());
  const Recipe mx = float32.with_quantized(fp8_gemms({.recipe = Fp8Recipe::mxfp8, .begin = 1, .end = 2}));
  REQUIRE(mx.of(1, Gemm::qkv, Role::gradient) == Format{DType::e4m3, Scaling::mx32});
  REQUIRE(mx.of(0, Gemm::qkv, Role::gradient) == Format{DType::f32, Scaling::none});
  REQUIRE(mx.quantizes(1, Gemm::o_proj));
  REQUIRE_FALSE(mx.quantizes(2, Gemm::o_proj));
  const Recipe kept = bfloat16.with_quantized(fp8_gemms({.begin = 1, .end = 3, .primary = true}));
  for (const int layer : {0, 1, 2, 3})
    REQUIRE(kept.keeps_fp8(layer, Gemm::mlp_out) == (layer == 1 || layer == 2));
  REQUIRE_FALSE(kept.keeps_fp8(1, Gemm::lm_head));
  REQUIRE_FALSE(hybrid.keeps_fp8(1, Gemm::mlp_out));
  for (const Recipe& recipe : {mx, hybrid, blockwise, kept}) REQUIRE(unsupported_reason(recipe, 4).empty());
}

TEST_CASE("what the ops cannot do is refused by name", "[precision]") {
  const auto refused_for = [](const Recipe& recipe, const char* word) {
    const std::string reason = unsupported_reason(recipe, 4);
    INFO(reason);
    return reason.find(word) != std::string::npos;
  };
  QuantizedGemms part = hybrid.quantized();
  part.gradient = {DType::bf16};
  REQUIRE(refused_for(hybrid.with_quantized(part), "layer 1: qkv gradient in bf16"));
  REQUIRE(unsupported_reason(hybrid.with_quantized(part), 1).empty());  // its only layer is not quantized
  REQUIRE(
      refused_for(float32.with_quantized(fp8_gemms({.recipe = Fp8Recipe::mxfp8, .end = 4, .primary = true})),
                  "weights kept in FP8 with mx32 scales"));
  part = blockwise.quantized();
  part.input.scaling = Scaling::none;
  REQUIRE(refused_for(blockwise.with_quantized(part), "layer 0: qkv input in e4m3 with none scales"));
  REQUIRE(refused_for(Recipe({.activations = DType::f16}), "activations in f16"));
  REQUIRE(refused_for(Recipe({.weights = DType::f16}), "weights in f16"));
  REQUIRE(refused_for(float32.with_bf16_logits(), "logits in bf16"));
  REQUIRE(refused_for(Recipe({.weights = DType::bf16,
                              .activations = DType::bf16,
                              .gradients = DType::bf16,
                              .logits = DType::bf16}),
                      "logits in bf16"));
  REQUIRE(refused_for(Recipe({.logits = DType::f16}), "logits in f16"));
  REQUIRE(refused_for(float16.with_bf16_logits(), "logits in bf16"));
  REQUIRE(refused_for(float16.with_quantized(hybrid.quantized()), "no op quantizes f16"));
  REQUIRE(refused_for(float16.with_optimizer({.main_gradients = DType::f16}), "main gradients in f16"));
  REQUIRE(refused_for(Recipe({.weight_gradients = DType::bf16}), "weight gradients in bf16"));
  REQUIRE(refused_for(Recipe({.optimizer = {.exp_avg_sq = DType::e5m2}}), "optimizer state in e5m2"));
  REQUIRE(unsupported_reason(Recipe({.optimizer = {.exp_avg = DType::e4m3, .exp_avg_sq = DType::f16}}), 1)
              .empty());
  REQUIRE(bfloat16.with_optimizer({.remainders = true}).optimizer().remainders);
  for (const Recipe& recipe : {float32, float16})
    REQUIRE(!recipe.with_optimizer({.remainders = true}).optimizer().remainders);
}

}  // namespace
}  // namespace nrl::precision
