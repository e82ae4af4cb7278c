#include "apps/plan/fp8_check.h"

#include <spdlog/fmt/fmt.h>

#include "apps/plan/run_plan.h"
#include "core/ops/libraries.h"

namespace nrl::plan {

Diagnostics check_fp8(const ConfigResult& result, const model::ModelSpec& spec, const DeviceModel& gpu) {
  constexpr const char* key = "policy.fp8_cfg.fp8_recipe";
  const precision::Recipe recipe = recipe_for(result.config, DeviceType::cuda, spec.layers);
  if (!recipe.quantizes_any() || !result.sound(key)) return {};
  if (constexpr const char* enabled = "policy.fp8_cfg.enabled"; spec.expert_layers() > 0)
    return {diagnose(
        result, enabled, fmt::format("{}: true does not support models with experts on a GPU", enabled), "",
        {"cuBLASLt's FP8 GEMMs need the rows of every expert, which only the GPU knows", "set it to false"})};
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
