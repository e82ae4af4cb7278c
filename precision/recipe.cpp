#include "precision/recipe.h"

#include <algorithm>
#include <utility>

#include "core/base/error.h"
#include "core/config/fp8_recipes.h"

namespace nrl::precision {
namespace {

bool is_f32_or_bf16(DType t) {
  return t == DType::f32 || t == DType::bf16;
}
bool is_supported(DType t) {
  return is_f32_or_bf16(t) || t == DType::f16;
}

}  // namespace

std::optional<DType> Recipe::master_weights() const {
  if (formats_.weights == formats_.master_weights || !formats_.optimizer.master) return std::nullopt;
  return formats_.master_weights;
}

Format Recipe::of(int layer, Gemm gemm, Role role) const {
  const QuantizedGemms& q = formats_.quantized;
  const bool has_formats = gemm < Gemm::attention_q || (gemm < Gemm::lm_head && q.attention);
  const bool quantized = has_formats && layer >= q.begin && layer < q.end;
  switch (role) {
    case Role::input:
      return quantized ? q.input : Format{formats_.activations};
    case Role::weight:
      return quantized ? q.weight : Format{formats_.weights};
    case Role::gradient:
      break;
  }
  if (quantized) return q.gradient;
  return {gemm == Gemm::lm_head ? formats_.logits_gradient : formats_.gradients};
}

ScaleLayout Recipe::scales(int layers, bool experts) const {
  const QuantizedGemms& q = formats_.quantized;
  const bool kept = q.amax_history > 0 && q.begin < std::min(q.end, layers);
  const size_t gemms = layer_gemms.size() + (experts ? expert_gemms.size() : 0);
  return {.layers = kept ? layers : 0,
          .history = kept ? q.amax_history : 0,
          .gemms = static_cast<int>(gemms + (q.attention ? attention_operands.size() : 0)),
          .first_of_attention = static_cast<int>(gemms)};
}

QuantizedGemms fp8_gemms(const Fp8Options& o) {
  constexpr DType e4m3 = DType::e4m3;
  QuantizedGemms q;
  q.begin = o.begin;
  q.end = o.end;
  q.primary = o.primary;
  q.cached = o.cached;
  q.attention = o.attention;
  const Fp8RecipeRules& rules = rules_of(o.recipe);
  if (rules.history) {
    q.amax_history = o.amax_history;
    q.most_recent = o.most_recent;
  }
  if (!rules.blocks()) q.margin = o.margin;
  q.input = {e4m3, rules.input};
  q.weight = {e4m3, rules.weight};
  q.gradient = {o.hybrid && !rules.blocks() ? DType::e5m2 : e4m3, rules.gradient};
  return q;
}

int64_t dimension_unit(Scaling scaling) {
  return scaling == Scaling::mx32 ? 32 : has_scale_blocks(scaling) ? 128 : 16;
}

std::string unsupported_reason(const Recipe& recipe, int layers) {
  for (const auto& [what, dtype] : {std::pair{"weights", recipe.weights()},
                                    {"activations", recipe.activations()},
                                    {"gradients", recipe.gradients()}})
    if (!is_supported(dtype))
      return fmt::format("{} in {}: the ops take f32, bf16 and f16", what, name_of(dtype));
  if (recipe.weights() != recipe.activations() || recipe.weights() != recipe.gradients())
    return fmt::format("weights in {}, activations in {}, gradients in {}: the ops take one type",
                       name_of(recipe.weights()), name_of(recipe.activations()), name_of(recipe.gradients()));
  if (const DType logits = recipe.of(0, Gemm::lm_head, Role::gradient).dtype; !is_supported(logits))
    return fmt::format("gradient of the logits in {}: the ops take f32, bf16 and f16", name_of(logits));
  if (recipe.logits() == DType::bf16 ? recipe.activations() != DType::bf16 ||
                                           recipe.of(0, Gemm::lm_head, Role::gradient).dtype != DType::bf16
                                     : recipe.logits() != DType::f32)
    return fmt::format("logits in {}: the ops take f32, or bf16 with activations and their gradient in bf16",
                       name_of(recipe.logits()));
  for (const auto& [what, dtype] : {std::pair{"weight gradients", recipe.weight_gradients()},
                                    {"master weights", recipe.master_weights().value_or(DType::f32)}})
    if (dtype != DType::f32) return fmt::format("{} in {}: the ops take f32", what, name_of(dtype));
  if (const DType dtype = recipe.optimizer().main_gradients; !is_f32_or_bf16(dtype))
    return fmt::format("main gradients in {}: the ops take f32 and bf16", name_of(dtype));
  for (const DType dtype : {recipe.optimizer().exp_avg, recipe.optimizer().exp_avg_sq})
    if (!is_supported(dtype) && dtype != DType::e4m3)
      return fmt::format("optimizer state in {}: the ops take f32, bf16, f16 and e4m3", name_of(dtype));
  if (const QuantizedGemms& q = recipe.quantized(); q.primary && q.weight.scaling == Scaling::mx32)
    return "weights kept in FP8 with mx32 scales: the transposed copy has others";
  if (const QuantizedGemms& q = recipe.quantized();
      q.attention &&
      (q.input != Format{DType::e4m3, Scaling::tensor} || q.gradient != Format{DType::e5m2, Scaling::tensor}))
    return fmt::format(
        "attention with inputs in {} and gradients in {} with {} scales: the op takes e4m3 and "
        "e5m2 with scales of tensors",
        name_of(q.input.dtype), name_of(q.gradient.dtype), name_of(q.input.scaling));
  for (int layer = 0; layer < layers; ++layer)
    for (const Gemm gemm : layer_gemms)
      for (const Role role : all_roles) {
        const Format f = recipe.of(layer, gemm, role);
        const bool fp8 = f.dtype == DType::e4m3 || f.dtype == DType::e5m2;
        if (fp8 ? f.scaling == Scaling::none : !is_supported(f.dtype) || f.scaling != Scaling::none)
          return fmt::format("layer {}: {} {} in {} with {} scales: no op quantizes", layer, name_of(gemm),
                             name_of(role), name_of(f.dtype), name_of(f.scaling));
        if (fp8 && recipe.activations() == DType::f16)
          return fmt::format("layer {}: {} {} in FP8: no op quantizes f16", layer, name_of(gemm),
                             name_of(role));
        if (fp8 != recipe.quantizes(layer, gemm))
          return fmt::format("layer {}: {} {} in {}: a GEMM takes FP8 operands or none", layer, name_of(gemm),
                             name_of(role), name_of(f.dtype));
      }
  return "";
}

const Recipe& recipe_for_weights(DType weights) {
  NRL_CHECK(is_f32_or_bf16(weights), "weights in {}: the ops take f32 and bf16", name_of(weights));
  return weights == DType::f32 ? float32 : bfloat16;
}

}  // namespace nrl::precision
