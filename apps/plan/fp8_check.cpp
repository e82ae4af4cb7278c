#include "apps/plan/fp8_check.h"

#include <algorithm>
#include <array>
#include <functional>

#include <spdlog/fmt/fmt.h>

#include "apps/plan/run_plan.h"
#include "core/ops/libraries.h"

namespace nrl::plan {
namespace {

constexpr const char* key = "policy.fp8_cfg.fp8_recipe";
constexpr std::string_view any_gpu = "a GPU";
constexpr std::array gpu_majors{12, 10, 9};
constexpr const char* attention_key = "policy.fp8_cfg.fp8_dot_product_attention";

// Why GPUs with this major number of their compute capability do not run the GEMMs; empty if they do.
std::string refusal(const Config& config, const model::ModelSpec& spec, int major) {
  const precision::Recipe recipe = recipe_for(config, DeviceType::cuda, spec.layers);
  if (!recipe.quantizes_any()) return {};
  const precision::QuantizedGemms& formats = recipe.quantized();
  return ops::fp8_gemm_refusal(major, formats.input.scaling, formats.weight.scaling);
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

/// The recipes, but for the present one, with which the rest of the configuration is valid and `runs`:
/// "a, b".
std::string fitting_recipes(const ConfigResult& result, const std::function<bool(const Config&)>& runs) {
  const std::string text = dump_resolved(result), now = value_text(result.config, key);
  std::string out;
  for (const std::string& value : allowed_values(key)) {
    const std::vector<std::string> change{fmt::format("{}={}", key, value)};
    const ConfigResult changed = load_config_text(text, "changed.yaml", change);
    if (value != now && changed.ok() && runs(changed.config)) out += (out.empty() ? "" : ", ") + value;
  }
  return out;
}

/// `majors`: of the GPUs that the run may have.
Diagnostic refused(const ConfigResult& result, const model::ModelSpec& spec, std::string_view gpu,
                   std::span<const int> majors, const std::string& why) {
  const auto runs = [&](const Config& config) {
    const bool mxfp8_experts =
        spec.expert_layers() > 0 && config.policy.fp8_cfg.fp8_recipe == Fp8Recipe::mxfp8;
    return !mxfp8_experts && std::any_of(majors.begin(), majors.end(), [&](int major) {
      return refusal(config, spec, major).empty() && attention_refusal(config, spec, major).empty();
    });
  };
  std::vector<std::string> notes;
  if (const std::string values = fitting_recipes(result, runs); !values.empty())
    notes.push_back(fmt::format("{} {}: {}", gpu == any_gpu ? "a GPU may run" : fmt::format("{} runs", gpu),
                                key, values));
  notes.emplace_back("or set policy.fp8_cfg.enabled to false");
  return diagnose(result, key,
                  fmt::format("{}: {} does not run on {}: {}", key,
                              name_of(result.config.policy.fp8_cfg.fp8_recipe), gpu, why),
                  "", std::move(notes));
}

}  // namespace

Diagnostics check_fp8_on_gpus(const ConfigResult& result, const model::ModelSpec& spec) {
  const Fp8Config& fp8 = result.config.policy.fp8_cfg;
  if (!fp8.enabled || !result.sound(key)) return {};
  if (constexpr const char* precision = "policy.precision";
      result.sound(precision) && result.config.policy.precision == Precision::float32)
    return {diagnose(result, precision,
                     fmt::format("{}: float32 does not run on a GPU with policy.fp8_cfg.enabled: true: a GPU "
                                 "rounds bfloat16 to FP8",
                                 precision),
                     "",
                     {fmt::format("set {} to bfloat16, or policy.fp8_cfg.enabled to false, or device: cpu, "
                                  "which emulates FP8",
                                  precision)})};
  if (spec.expert_layers() > 0 && fp8.fp8_recipe == Fp8Recipe::mxfp8)
    return {diagnose(result, key,
                     fmt::format("{}: mxfp8 does not support models with experts on a GPU, and {} has some",
                                 key, name_of(spec.family)),
                     "the GPU's kernel for experts has no scales of 32 numbers",
                     {"use tensorwise, delayed or blockwise, or device: cpu, which emulates FP8"})};
  if (const std::string why = attention_refusal(result.config, spec, ops::fp8_attention_major); !why.empty())
    return {attention_refused(result, any_gpu, why)};
  std::string why;
  for (const int major : gpu_majors) {
    why = refusal(result.config, spec, major);
    if (why.empty()) return {};
  }
  return {refused(result, spec, any_gpu, gpu_majors, why)};
}

Diagnostics check_fp8(const ConfigResult& result, const model::ModelSpec& spec, const DeviceModel& gpu) {
  if (!result.sound(key)) return {};
  if (Diagnostics any = check_fp8_on_gpus(result, spec); !any.empty()) return any;
  if (const std::string why = refusal(result.config, spec, gpu.major); !why.empty())
    return {refused(result, spec, gpu.product, std::array{gpu.major}, why)};
  if (const std::string why = attention_refusal(result.config, spec, gpu.major); !why.empty())
    return {attention_refused(result, gpu.product, why)};
  return {};
}

}  // namespace nrl::plan
