// Rules about number formats and GEMMs. Rules about FP8 and the sizes of the model are in
// apps/check/fp8.cpp.
#include "core/base/text.h"
#include "core/config/fp8_recipes.h"
#include "core/config/rules/tables.h"

namespace nrl::config_detail {
namespace {

constexpr const char *enabled = "policy.fp8_cfg.enabled", *recipe = "policy.fp8_cfg.fp8_recipe",
                     *param = "policy.fp8_cfg.fp8_param",
                     *attention = "policy.fp8_cfg.fp8_dot_product_attention",
                     *chosen = "policy.fp8_cfg.fp8_recipe is <policy.fp8_cfg.fp8_recipe>";

Verdict judge_loss_scaling(const ConfigResult& r) {
  const auto scaling = resolved_loss_scaling(r.config.policy);
  const DistributedConfig& d = r.config.distributed;
  if (!scaling || !scaling->dynamic || d.grad_reduce_dtype != DType::e4m3 || !d.grad_reduce_error_feedback)
    return {};
  const bool chosen = r.config.policy.loss_scaling.is_auto();
  return {{.reason = fmt::format("policy.loss_scaling: {} with distributed.grad_reduce_error_feedback: true",
                                 chosen ? "auto is dynamic in float16" : "dynamic"),
           .remedy =
               {"what rounding gradients to fp8 lost is kept for the next step, which may have another scale",
                "use a fixed number, or distributed.grad_reduce_error_feedback: false"},
           .key = chosen ? "policy.precision" : ""}};
}

ConfigRule not_with_float16(Condition set, const char* why, const char* fix) {
  const std::string text = fmt::format("<:{}> does not go with policy.precision: float16", set.key);
  return row({std::move(set), is("policy.precision", {"float16"})}, {text, {why, fix}});
}

std::vector<std::string> recipes(bool (*select)(const Fp8RecipeRules&)) {
  const auto names = fp8_recipes_with(select);
  return {names.begin(), names.end()};
}

/// A rule about FP8 operands with some recipes.
ConfigRule with_fp8(
    std::vector<Condition> all, Broken texts,
    bool (*recipe_rules)(const Fp8RecipeRules&) = [](const Fp8RecipeRules&) { return true; }) {
  all.push_back(is(enabled, {"true"}));
  all.push_back(is(recipe, recipes(recipe_rules)));
  return row(std::move(all), std::move(texts));
}

ConfigRule all_layers_with_history(const std::string& key) {
  return with_fp8({is_not(key, "0")},
                  {fmt::format("<:{}> is not supported with <{}> scales", key, recipe),
                   {chosen, "use tensorwise, or set it to 0"}},
                  [](const Fp8RecipeRules& r) { return r.history; });
}

const ConfigRule precision_table[] = {
    not_empty({"kernels.gemm_tuning"}),
    row({is_not("policy.optimizer.main_grads_dtype", "fp32"), is(key::sharding, {"ddp"})},
        {"<:policy.optimizer.main_grads_dtype> needs distributed.shard_strategy: optim, optim_grads, "
         "optim_grads_params or hsdp",
         {"the gradients of ddp are accumulated by GEMMs, in fp32, and replaced by their sum over all ranks",
          "use optim, which one rank may have as well"}}),
    row({is_not("policy.optimizer.main_grads_dtype", "fp32"), is("distributed.grad_reduce_dtype", {"fp8"})},
        {"distributed.grad_reduce_dtype: fp8 needs gradients that are kept in fp32",
         {"<:policy.optimizer.main_grads_dtype> is at <@policy.optimizer.main_grads_dtype>",
          "use distributed.grad_reduce_dtype: bf16"}}),
    row({is("policy.optimizer.main_params_dtype", {"bf16"}),
         is("policy.optimizer.store_param_remainders", {"true"})},
        {"<:policy.optimizer.store_param_remainders> needs master weights, and main_params_dtype: bf16 has "
         "none",
         {"<:policy.optimizer.main_params_dtype> is at <@policy.optimizer.main_params_dtype>",
          "use one of them"}}),
    {{"policy.loss_scaling", "distributed.grad_reduce_error_feedback", "policy.precision"},
     judge_loss_scaling},
    row({is("policy.logits_dtype", {"bfloat16"}), is("policy.precision", {"float32"})},
        {"policy.logits_dtype: bfloat16 needs policy.precision: bfloat16",
         {"policy.precision: float32 is at <@policy.precision>"}}),
    not_with_float16(is("policy.logits_dtype", {"bfloat16"}), "the logits of float16 weights are fp32",
                     "set it to float32 or auto"),
    not_with_float16(is(enabled, {"true"}), "operands are rounded to FP8 from bfloat16 or float32",
                     "use policy.precision: bfloat16"),
    all_layers_with_history("policy.fp8_cfg.num_first_layers_in_bf16"),
    all_layers_with_history("policy.fp8_cfg.num_last_layers_in_bf16"),
    with_fp8({is(param, {"true"})},
             {"<:policy.fp8_cfg.fp8_param> is not supported with <policy.fp8_cfg.fp8_recipe>: the transposed "
              "copy has scales of its own, which FP8 numbers do not give",
              {chosen, "use another recipe, or set it to false"}},
             [](const Fp8RecipeRules& r) { return !r.transposes(); }),
    with_fp8(
        {is(param, {"true"}), is("policy.lora.enabled", {"true"})},
        {"<:policy.fp8_cfg.fp8_param> is not supported with adapters: the optimizer writes FP8 weights, and "
         "has none of a frozen model",
         {"policy.lora.enabled is at <@policy.lora.enabled>; set policy.fp8_cfg.fp8_param to false"}}),
    with_fp8({is(param, {"true"}), is_not("policy.freeze", "[]")},
             {"<:policy.fp8_cfg.fp8_param> is not supported with <:policy.freeze>: the optimizer writes FP8 "
              "weights, and has none of frozen ones",
              {"set policy.fp8_cfg.fp8_param to false"}}),
    with_fp8({is(param, {"true"}), is_not("policy.fp8_cfg.cache_weights", "auto")},
             {"<:policy.fp8_cfg.cache_weights> has no effect with fp8_param: true: the weights are in FP8",
              {"set it to auto, or policy.fp8_cfg.fp8_param to false"}}),
    with_fp8(
        {is(attention, {"true"})},
        {"<:policy.fp8_cfg.fp8_dot_product_attention> is not supported with <policy.fp8_cfg.fp8_recipe>: "
         "attention takes scales of tensors",
         {chosen,
          fmt::format("use {}, or set it to false",
                      alternatives(fp8_recipes_with([](const Fp8RecipeRules& r) { return !r.blocks(); })))}},
        [](const Fp8RecipeRules& r) { return r.blocks(); }),
    with_fp8({is(attention, {"true"}), is_not("policy.fp8_cfg.fp8", "hybrid")},
             {"<:policy.fp8_cfg.fp8_dot_product_attention> is not supported with <:policy.fp8_cfg.fp8>: "
              "gradients of scores span more than e4m3 does",
              {"set policy.fp8_cfg.fp8 to hybrid, or policy.fp8_cfg.fp8_dot_product_attention to false"}},
             [](const Fp8RecipeRules& r) { return !r.blocks(); }),
    with_fp8({is(attention, {"true"}), is_not(key::context, "1")},
             {"<:policy.fp8_cfg.fp8_dot_product_attention> is not supported with "
              "<:distributed.context_parallel_size>: ranks exchange keys and values in policy.precision",
              {"set distributed.context_parallel_size to 1, or policy.fp8_cfg.fp8_dot_product_attention to "
               "false"}}),
    with_fp8(
        {is("distributed.tp_comm_overlap", {"pipelined", "ring"})},
        {"<:distributed.tp_comm_overlap> is not supported with <policy.fp8_cfg.fp8_recipe>: the scales of "
         "blocks belong to all rows of a GEMM",
         {chosen, "set distributed.tp_comm_overlap to bulk"}},
        [](const Fp8RecipeRules& r) { return r.blocks(); }),
};

}  // namespace

std::span<const ConfigRule> precision_rules() {
  return precision_table;
}

}  // namespace nrl::config_detail
