#include "apps/plan/fp8_check.h"

#include <spdlog/fmt/fmt.h>

#include "apps/plan/run_plan.h"
#include "core/ops/libraries.h"

namespace nrl::plan {
namespace {

constexpr const char* key = "policy.fp8_cfg.fp8_recipe";

}  // namespace

Diagnostics check_fp8_experts(const ConfigResult& result, const model::ModelSpec& spec) {
  const Fp8Config& fp8 = result.config.policy.fp8_cfg;
  if (spec.expert_layers() == 0 || !fp8.enabled || fp8.fp8_recipe != Fp8Recipe::mxfp8 || !result.sound(key))
    return {};
  return {diagnose(result, key,
                   fmt::format("{}: mxfp8 does not support models with experts on a GPU, and {} has some",
                               key, name_of(spec.family)),
                   "the GPU's kernel for experts has no scales of 32 numbers",
                   {"use another recipe, or device: cpu, which emulates FP8"})};
}

Diagnostics check_fp8(const ConfigResult& result, const model::ModelSpec& spec, const DeviceModel& gpu) {
  const precision::Recipe recipe = recipe_for(result.config, DeviceType::cuda, spec.layers);
  if (!recipe.quantizes_any() || !result.sound(key)) return {};
  if (Diagnostics experts = check_fp8_experts(result, spec); !experts.empty()) return experts;
  const precision::QuantizedGemms& formats = recipe.quantized();
  const bool biases = spec.qkv_bias || spec.o_bias || spec.mlp_bias;
  const std::string why = ops::fp8_gemm_refusal(gpu.major, formats.input.scaling, formats.weight.scaling,
                                                recipe.activations(), biases);
  if (why.empty()) return {};
  return {diagnose(result, key,
                   fmt::format("the GEMMs of this recipe do not run on {}: {}", gpu.product, why), "",
                   {"another recipe, another policy.precision or policy.fp8_cfg.enabled: false may"})};
}

}  // namespace nrl::plan
