// Keys of FP8 GEMMs against each other. What needs the model's sizes is checked in apps/train.
#include "core/base/text.h"
#include "core/config/fp8_recipes.h"
#include "core/config/load.h"
#include "core/config/validate.h"

namespace nrl::config_detail {

void check_fp8(Checker c) {
  const Config& config = c.result.config;
  const Fp8Config& fp8 = config.policy.fp8_cfg;
  constexpr std::string_view enabled = "policy.fp8_cfg.enabled", recipe = "policy.fp8_cfg.fp8_recipe";
  constexpr const char* param = "policy.fp8_cfg.fp8_param";
  if (!fp8.enabled || !c.sound({enabled, recipe})) return;
  const Fp8RecipeRules& rules = rules_of(fp8.fp8_recipe);
  const std::string chosen = fmt::format("{} is {}", recipe, name_of(fp8.fp8_recipe));
  for (const auto& [key, layers] :
       {std::pair("policy.fp8_cfg.num_first_layers_in_bf16", fp8.num_first_layers_in_bf16),
        std::pair("policy.fp8_cfg.num_last_layers_in_bf16", fp8.num_last_layers_in_bf16)})
    if (rules.history && layers > 0 && c.sound({key}))
      c.error(key, fmt::format("{}: {} is not supported with {} scales", key, layers, name_of(rules.recipe)),
              "", {chosen, "use tensorwise, or set it to 0"});
  if (!rules.transposes() && fp8.fp8_param && c.sound({param}))
    c.error(param,
            fmt::format("{}: true is not supported with {}: the transposed copy has scales of its own, which "
                        "FP8 numbers do not give",
                        param, name_of(rules.recipe)),
            "", {chosen, "use another recipe, or set it to false"});
  if (constexpr const char* key = "policy.fp8_cfg.fp8_dot_product_attention";
      fp8.fp8_dot_product_attention && c.sound({key})) {
    if (rules.blocks())
      c.error(
          key,
          fmt::format("{}: true is not supported with {}: attention takes scales of tensors", key,
                      name_of(fp8.fp8_recipe)),
          "",
          {chosen,
           fmt::format("use {}, or set it to false",
                       alternatives(fp8_recipes_with([](const Fp8RecipeRules& r) { return !r.blocks(); })))});
    else if (constexpr const char* format = "policy.fp8_cfg.fp8";
             fp8.fp8 != Fp8Format::hybrid && c.sound({format}))
      c.error(
          key,
          fmt::format("{}: true is not supported with {}: {}: gradients of scores span more than e4m3 does",
                      key, format, name_of(fp8.fp8)),
          "", {fmt::format("set {} to hybrid, or {} to false", format, key)});
    if (constexpr const char* context = "distributed.context_parallel_size";
        config.distributed.context_parallel_size > 1 && c.sound({context}))
      c.error(key,
              fmt::format("{}: true is not supported with {}: {}: ranks exchange keys and values in "
                          "policy.precision",
                          key, context, config.distributed.context_parallel_size),
              "", {fmt::format("set {} to 1, or {} to false", context, key)});
  }
  const ShardStrategy strategy = config.distributed.shard_strategy;
  // The other strategies with shards refuse it with any weights.
  const bool shards = strategy == ShardStrategy::optim || strategy == ShardStrategy::optim_grads;
  if (constexpr const char* key = "logger.sample_period";
      fp8.fp8_param && shards && config.logger.sample_period > 0 && c.sound({key, param}))
    c.error(
        key,
        fmt::format("{}: {} needs all parameters on rank 0, which has them in FP8 and a shard of others", key,
                    config.logger.sample_period),
        "",
        {fmt::format("set it to 0 and use nrl-train generate with a checkpoint, or set {} to false", param)});
  if (constexpr const char* key = "distributed.tp_comm_overlap";
      config.distributed.tp_comm_overlap.value_or(TpCommOverlap::none) != TpCommOverlap::none &&
      c.sound({key}))
    c.error(key,
            fmt::format("{}: {} is not supported with FP8: operands are rounded when all rows have arrived",
                        key, name_of(config.distributed.tp_comm_overlap.value())),
            "", {fmt::format("{} is at {}; set {} to none", enabled, c.where(enabled), key)});
}

}  // namespace nrl::config_detail
