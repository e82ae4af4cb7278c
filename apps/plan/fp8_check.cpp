#include "apps/plan/fp8_check.h"

#include <spdlog/fmt/fmt.h>

#include "apps/plan/run_plan.h"
#include "core/ops/libraries.h"

namespace nrl::plan {
namespace {

constexpr const char* key = "policy.fp8_cfg.fp8_recipe";
constexpr const char* attention_key = "policy.fp8_cfg.fp8_dot_product_attention";

// Why GPUs with this major number of their compute capability do not run the GEMMs; empty if they do.
std::string refusal(const Config& config, const model::ModelSpec& spec, int major) {
  const precision::Recipe recipe = recipe_for(config, DeviceType::cuda, spec.layers);
  if (!recipe.quantizes_any()) return {};
  const precision::QuantizedGemms& formats = recipe.quantized();
  return ops::fp8_gemm_refusal(major, formats.input.scaling, formats.weight.scaling, recipe.activations(),
                               spec.qkv_bias || spec.o_bias || spec.mlp_bias);
}

// The same of attention with FP8 operands.
std::string attention_refusal(const Config& config, const model::ModelSpec& spec, int major) {
  const precision::Recipe recipe = recipe_for(config, DeviceType::cuda, spec.layers);
  if (!recipe.quantizes_any() || !recipe.quantized().attention) return {};
  if (config.data.reset_attention_mask)
    return "FP8 operands of sequences of different lengths (data.reset_attention_mask)";
  return ops::fp8_attention_refusal(major, recipe.activations(), spec.head_dim);
}

Diagnostic attention_refused(const ConfigResult& result, std::string_view gpu, const std::string& why) {
  return diagnose(result, attention_key,
                  fmt::format("attention with FP8 operands does not run on {}: {}", gpu, why), "",
                  {fmt::format("set {} to false, or device: cpu, which emulates FP8", attention_key)});
}

Diagnostic refused(const ConfigResult& result, std::string_view gpu, const std::string& why) {
  return diagnose(result, key, fmt::format("the GEMMs of this recipe do not run on {}: {}", gpu, why), "",
                  {"another recipe, another policy.precision or policy.fp8_cfg.enabled: false may"});
}

}  // namespace

Diagnostics check_fp8_on_gpus(const ConfigResult& result, const model::ModelSpec& spec) {
  const Fp8Config& fp8 = result.config.policy.fp8_cfg;
  if (!fp8.enabled || !result.sound(key)) return {};
  if (spec.expert_layers() > 0 && fp8.fp8_recipe == Fp8Recipe::mxfp8)
    return {diagnose(result, key,
                     fmt::format("{}: mxfp8 does not support models with experts on a GPU, and {} has some",
                                 key, name_of(spec.family)),
                     "the GPU's kernel for experts has no scales of 32 numbers",
                     {"use another recipe, or device: cpu, which emulates FP8"})};
  if (const std::string why = attention_refusal(result.config, spec, ops::fp8_attention_major); !why.empty())
    return {attention_refused(result, "a GPU", why)};
  std::string why;
  for (const int major : {12, 10, 9}) {
    why = refusal(result.config, spec, major);
    if (why.empty()) return {};
  }
  return {refused(result, "a GPU", why)};
}

Diagnostics check_fp8(const ConfigResult& result, const model::ModelSpec& spec, const DeviceModel& gpu) {
  if (!result.sound(key)) return {};
  if (Diagnostics any = check_fp8_on_gpus(result, spec); !any.empty()) return any;
  if (const std::string why = refusal(result.config, spec, gpu.major); !why.empty())
    return {refused(result, gpu.product, why)};
  if (const std::string why = attention_refusal(result.config, spec, gpu.major); !why.empty())
    return {attention_refused(result, gpu.product, why)};
  return {};
}

}  // namespace nrl::plan
