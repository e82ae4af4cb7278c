// Rules about FP8 operands.
#include <algorithm>
#include <array>
#include <numeric>

#include <spdlog/fmt/fmt.h>

#include "apps/check/check.h"
#include "apps/check/rule.h"
#include "apps/plan/run_plan.h"
#include "core/base/text.h"
#include "core/config/fp8_recipes.h"
#include "core/ops/libraries.h"

namespace nrl::check {
namespace {

constexpr const char *enabled_key = "policy.fp8_cfg.enabled", *recipe_key = "policy.fp8_cfg.fp8_recipe",
                     *attention_key = "policy.fp8_cfg.fp8_dot_product_attention",
                     *param_key = "policy.fp8_cfg.fp8_param",
                     *tensor_key = "distributed.tensor_parallel_size",
                     *etp_key = "distributed.expert_tensor_parallel_size";
constexpr std::string_view any_gpu = "a GPU";
constexpr std::array gpu_majors{12, 10, 9};

// Why GPUs with this major number of their compute capability do not run the GEMMs; empty if they do.
std::string refusal(const Config& config, const model::ModelSpec& spec, int major) {
  const precision::Recipe recipe = plan::recipe_for(config, DeviceType::cuda, spec.layers);
  if (!recipe.quantizes_any()) return {};
  const precision::QuantizedGemms& formats = recipe.quantized();
  return ops::fp8_gemm_refusal(major, formats.input.scaling, formats.weight.scaling);
}

// The same of attention with FP8 operands.
std::string attention_refusal(const Config& config, const model::ModelSpec& spec, int major) {
  const precision::Recipe recipe = plan::recipe_for(config, DeviceType::cuda, spec.layers);
  if (!recipe.quantizes_any() || !recipe.quantized().attention) return {};
  if (trains_on_examples(config))
    return fmt::format("FP8 operands of examples of different lengths (algorithm {})",
                       name_of(config.algorithm));
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
  const std::string text = dump_resolved(result), now = value_text(result.config, recipe_key);
  std::string out;
  for (const std::string& value : allowed_values(recipe_key)) {
    const std::vector<std::string> change{fmt::format("{}={}", recipe_key, value)};
    const ConfigResult changed = load_config_text(text, "changed.yaml", change);
    if (value != now && changed.ok() && runs(changed.config)) out += (out.empty() ? "" : ", ") + value;
  }
  return out;
}

/// `majors`: of the GPUs that the run may have.
Diagnostic refused(const ConfigResult& result, const model::ModelSpec& spec, std::string_view gpu,
                   std::span<const int> majors, const std::string& why) {
  const auto runs = [&](const Config& config) {
    return std::any_of(majors.begin(), majors.end(), [&](int major) {
      return refusal(config, spec, major).empty() && attention_refusal(config, spec, major).empty();
    });
  };
  std::vector<std::string> notes;
  if (const std::string values = fitting_recipes(result, runs); !values.empty())
    notes.push_back(fmt::format("{} {}: {}", gpu == any_gpu ? "a GPU may run" : fmt::format("{} runs", gpu),
                                recipe_key, values));
  notes.emplace_back("or set policy.fp8_cfg.enabled to false");
  return diagnose(result, recipe_key,
                  fmt::format("{}: {} does not run on {}: {}", recipe_key,
                              name_of(result.config.policy.fp8_cfg.fp8_recipe), gpu, why),
                  "", std::move(notes));
}

/// An error if no GPU runs what policy.fp8_cfg gives FP8 operands in this model.
Diagnostics check_fp8_on_gpus(const ConfigResult& result, const model::ModelSpec& spec) {
  const Fp8Config& fp8 = result.config.policy.fp8_cfg;
  if (!fp8.enabled || !result.sound(recipe_key)) return {};
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
  if (const std::string why = attention_refusal(result.config, spec, ops::fp8_attention_major); !why.empty())
    return {attention_refused(result, any_gpu, why)};
  std::string why;
  for (const int major : gpu_majors) {
    why = refusal(result.config, spec, major);
    if (why.empty()) return {};
  }
  return {refused(result, spec, any_gpu, gpu_majors, why)};
}

Verdict judge_layers(const Facts& f) {
  const Fp8Config& fp8 = f.policy().fp8_cfg;
  if (fp8.num_first_layers_in_bf16 + fp8.num_last_layers_in_bf16 < f.spec().layers) return {};
  return {
      {fmt::format("no layer reads FP8: {} first and {} last of {} layers are excluded",
                   fp8.num_first_layers_in_bf16, fp8.num_last_layers_in_bf16, f.spec().layers),
       {fmt::format("lower policy.fp8_cfg.num_first_layers_in_bf16 or num_last_layers_in_bf16, or set {} to "
                    "false",
                    enabled_key)}}};
}

Verdict judge_param(const Facts& f) {
  if (f.spec().expert_layers() == 0 || !f.policy().fp8_cfg.fp8_param) return {};
  return {{fmt::format("{}: true does not support models with experts, and {} has some", param_key,
                       name_of(f.spec().family)),
           {"set it to false"}}};
}

Scaling scaling_of(const Facts& f) {
  return plan::recipe_for(f.config(), DeviceType::cpu, f.spec().layers).quantized().input.scaling;
}

/// A dimension of a rank's matrices.
struct Dimension {
  std::string key;
  const char* what;
  int64_t size = 0;   ///< 0: the model has none
  int64_t parts = 1;  ///< ranks that divide it
  /// The matrices of experts lie below each other, and no block of scales may have parts of two.
  bool expert = false;
};

Rule fits_scales(std::vector<std::string> keys, std::function<Dimension(const Facts&)> of) {
  return {std::move(keys), [of = std::move(of)](const Facts& f) -> Verdict {
            const Dimension d = of(f);
            const Scaling scaling = scaling_of(f);
            const int64_t unit = d.expert ? row_unit(scaling) : precision::dimension_unit(scaling);
            if (d.size / d.parts % unit == 0) return {};
            const std::string split = d.parts > 1 ? fmt::format(" on each of {} {}tensor-parallel ranks",
                                                                d.parts, d.expert ? "expert-" : "")
                                                  : "";
            return {{.reason = fmt::format(
                         "{}: {} {}{} are not a multiple of {}, which FP8 with {} scales needs", d.key,
                         d.size / d.parts, d.what, split, unit, name_of(f.policy().fp8_cfg.fp8_recipe)),
                     .remedy = {fmt::format("use a model of other sizes, another {}, or {}: false",
                                            recipe_key, enabled_key)},
                     .key = d.key}};
          }};
}

/// A dimension that tensor-parallel ranks divide.
Rule fits_scales(const char* key, const char* what, int64_t (*size)(const model::ModelSpec&)) {
  return fits_scales({recipe_key}, [=](const Facts& f) {
    return Dimension{key, what, size(f.spec()), f.distributed().tensor_parallel_size};
  });
}

Verdict judge_attention_dropout(const Facts& f) {
  if (!f.policy().fp8_cfg.fp8_dot_product_attention || f.spec().attention_dropout <= 0) return {};
  return {{.reason = fmt::format("{}: true is not supported with dropout of probabilities, which is {}",
                                 attention_key, f.spec().attention_dropout),
           .remedy = {"set policy.model.attention_dropout (attn_pdrop) to 0, or it to false"},
           .key = attention_key}};
}

Verdict judge_microbatch(const Facts& f) {
  // A microbatch of auto is known with the ranks, which must suit the rest of the configuration.
  const bool chosen = f.policy().train_micro_batch_size.is_auto();
  if (chosen && (f.world == 0 || !f.result.ok())) return {};
  const int64_t rows = row_unit(scaling_of(f)),
                length = f.policy().max_total_sequence_length / f.distributed().context_parallel_size,
                micro = chosen ? resolve_batch(f.config(), f.world).micro
                               : f.policy().train_micro_batch_size.value();
  if (length * micro % rows == 0) return {};
  return {
      {fmt::format("policy.max_total_sequence_length: a microbatch of {} x {} tokens is not a multiple of "
                   "{}, which FP8 with {} scales needs",
                   micro, length, rows, name_of(f.policy().fp8_cfg.fp8_recipe)),
       {fmt::format("fits: a multiple of {} for each rank", rows / std::gcd(rows, micro)),
        fmt::format("or microbatches of a multiple of {} sequences", rows / std::gcd(rows, length))}}};
}

// Tables of rules: if a rule of one table is broken, the next tables are not judged.
const Rule fp8_layer_table[] = {{{enabled_key}, judge_layers}};
const Rule fp8_param_table[] = {{{param_key}, judge_param}};
const Rule fp8_size_table[] = {
    fits_scales({recipe_key},
                [](const Facts& f) {
                  return Dimension{"policy.model.hidden_size", "columns of the residual stream",
                                   f.spec().hidden, 1, f.spec().expert_layers() > 0};
                }),
    fits_scales("policy.model.num_attention_heads", "columns of the queries",
                [](const model::ModelSpec& m) { return m.q_width(); }),
    fits_scales("policy.model.num_key_value_heads", "columns of queries, keys and values",
                [](const model::ModelSpec& m) { return m.qkv_width(); }),
    fits_scales({recipe_key},
                [](const Facts& f) {
                  return Dimension{"policy.model.num_key_value_heads", "columns of the keys",
                                   f.policy().fp8_cfg.fp8_dot_product_attention ? f.spec().kv_width() : 0,
                                   f.distributed().tensor_parallel_size};
                }),
    {{recipe_key}, judge_attention_dropout},
    fits_scales("policy.model.intermediate_size", "columns of the MLP",
                [](const model::ModelSpec& m) { return m.expert_layers() < m.layers ? m.ffn : 0; }),
    fits_scales({recipe_key, etp_key},
                [](const Facts& f) {
                  const bool experts = f.spec().expert_layers() > 0;
                  return Dimension{
                      "policy.model." + std::string(model::rules_of(f.spec().family).experts.ffn_key),
                      "columns of an expert", experts ? f.spec().moe.ffn : 0,
                      f.distributed().expert_tensor_parallel_size, true};
                }),
    fits_scales("policy.model.shared_expert_intermediate_size", "columns of the shared expert",
                [](const model::ModelSpec& m) { return m.moe.shared_ffn; }),
    {{"policy.max_total_sequence_length", "distributed.context_parallel_size"}, judge_microbatch},
};

}  // namespace

Diagnostics check_fp8_on_gpu(const ConfigResult& result, const model::ModelSpec& spec,
                             const machine::DeviceModel& gpu) {
  if (!result.sound(recipe_key)) return {};
  if (Diagnostics any = check_fp8_on_gpus(result, spec); !any.empty()) return any;
  if (const std::string why = refusal(result.config, spec, gpu.major); !why.empty())
    return {refused(result, spec, gpu.product, std::array{gpu.major}, why)};
  if (const std::string why = attention_refusal(result.config, spec, gpu.major); !why.empty())
    return {attention_refused(result, gpu.product, why)};
  return {};
}

Diagnostics check_fp8(const Facts& facts) {
  const auto sound = [&](const char* key) { return facts.result.sound(key); };
  if (!facts.policy().fp8_cfg.enabled || !sound(enabled_key) || !sound(recipe_key) || !sound(tensor_key))
    return {};
  if (Diagnostics found = judge(fp8_layer_table, facts); !found.empty()) return found;
  if (facts.gpu && sound("device"))
    if (Diagnostics found = check_fp8_on_gpus(facts.result, facts.spec()); !found.empty()) return found;
  return judge_levels({fp8_param_table, fp8_size_table}, facts);
}

}  // namespace nrl::check
