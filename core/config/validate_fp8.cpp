// Keys of FP8 GEMMs against each other. What needs the model's sizes is checked in apps/train.
#include "core/config/load.h"
#include "core/config/validate.h"

namespace nrl::config_detail {

void check_fp8(Checker c) {
  const Config& config = c.result.config;
  const Fp8Config& fp8 = config.policy.fp8_cfg;
  constexpr std::string_view enabled = "policy.fp8_cfg.enabled", recipe = "policy.fp8_cfg.fp8_recipe";
  if (!fp8.enabled || !c.sound({enabled, recipe})) return;
  const bool delayed = fp8.fp8_recipe == Fp8Recipe::delayed;
  const std::string chosen = fmt::format("{} is {}", recipe, name_of(fp8.fp8_recipe));
  for (const auto& [key, layers] :
       {std::pair("policy.fp8_cfg.num_first_layers_in_bf16", fp8.num_first_layers_in_bf16),
        std::pair("policy.fp8_cfg.num_last_layers_in_bf16", fp8.num_last_layers_in_bf16)})
    if (delayed && layers > 0 && c.sound({key}))
      c.error(key, fmt::format("{}: {} is not supported with delayed scales", key, layers), "",
              {chosen, "use tensorwise, or set it to 0"});
  const Fp8Config defaults;
  for (const auto& [key, same] : {std::pair("policy.fp8_cfg.fp8_amax_history_len",
                                            fp8.fp8_amax_history_len == defaults.fp8_amax_history_len),
                                  std::pair("policy.fp8_cfg.fp8_amax_compute_algo",
                                            fp8.fp8_amax_compute_algo == defaults.fp8_amax_compute_algo)})
    if (!delayed && !same && c.sound({key}))
      c.error(key, fmt::format("{} has no meaning: only delayed scales follow from earlier steps", key), "",
              {chosen, "remove it"});
  const bool blocks = fp8.fp8_recipe == Fp8Recipe::blockwise || fp8.fp8_recipe == Fp8Recipe::mxfp8;
  if (constexpr const char* key = "policy.fp8_cfg.fp8_margin"; blocks && fp8.fp8_margin > 0 && c.sound({key}))
    c.error(key, fmt::format("{}: {} has no meaning with scales of blocks", key, fp8.fp8_margin), "",
            {chosen, "set it to 0"});
  if (constexpr const char* key = "distributed.tp_comm_overlap";
      config.distributed.tp_comm_overlap != TpCommOverlap::none && c.sound({key}))
    c.error(key,
            fmt::format("{}: {} is not supported with FP8: operands are rounded when all rows have arrived",
                        key, name_of(config.distributed.tp_comm_overlap)),
            "", {fmt::format("{} is at {}; set {} to none", enabled, c.where(enabled), key)});
}

}  // namespace nrl::config_detail
