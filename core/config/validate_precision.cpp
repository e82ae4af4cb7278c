// Keys of number formats against each other, but for FP8 (validate_fp8.cpp).
#include "core/config/load.h"
#include "core/config/validate.h"

namespace nrl::config_detail {

namespace {

void check_optimizer_state(Checker& c, const Config& config) {
  const OptimizerConfig& o = config.policy.optimizer;
  const ShardStrategy s = config.distributed.shard_strategy;
  const bool sharded = s != ShardStrategy::ddp && s != ShardStrategy::optim;
  if (const std::string key = "policy.optimizer.main_grads_dtype";
      o.main_grads_dtype != DType::f32 && !sharded && c.sound({key, "distributed.shard_strategy"}))
    c.error(key,
            fmt::format("{}: {} needs gradients in shards, but distributed.shard_strategy is {}", key,
                        name_of(o.main_grads_dtype), name_of(s)),
            "",
            {"whole gradients are accumulated by GEMMs, in fp32",
             "use distributed.shard_strategy: optim_grads, optim_grads_params or hsdp"});
}

void check_loss_scaling(Checker& c, const Config& config) {
  const std::string key = "policy.loss_scaling", feedback = "distributed.grad_reduce_error_feedback";
  if (!c.sound({key, feedback, "policy.precision"})) return;
  const auto scaling = resolved_loss_scaling(config.policy);
  if (!scaling || !scaling->dynamic) return;
  if (config.distributed.grad_reduce_dtype == DType::e4m3 && config.distributed.grad_reduce_error_feedback)
    c.error(config.policy.loss_scaling.is_auto() ? "policy.precision" : key,
            fmt::format("{}: {} with {}: true", key,
                        config.policy.loss_scaling.is_auto() ? "auto is dynamic in float16" : "dynamic",
                        feedback),
            "",
            {"what rounding gradients to fp8 lost is kept for the next step, which may have another scale",
             fmt::format("use a fixed number, or {}: false", feedback)});
}

// What float16 does not go with.
void check_float16(Checker& c, const Config& config) {
  constexpr std::string_view key = "policy.precision";
  if (config.policy.precision != Precision::float16 || !c.sound({key})) return;
  const auto refuse = [&](const std::string& other, std::string_view value, std::string reason,
                          std::string fix) {
    if (c.sound({other}))
      c.error(other, fmt::format("{}: {} does not go with {}: float16", other, value, key), "",
              {std::move(reason), std::move(fix)});
  };
  if (config.policy.logits_dtype == LogitsDType::bfloat16)
    refuse("policy.logits_dtype", "bfloat16", "the logits of float16 weights are fp32",
           "set it to float32 or auto");
  if (config.logger.sample_period > 0)
    refuse("logger.sample_period", std::to_string(config.logger.sample_period),
           "text is generated in float32 or bfloat16",
           "set it to 0 and use nrl-train generate with a checkpoint, which computes in fp32");
  if (config.policy.fp8_cfg.enabled)
    refuse("policy.fp8_cfg.enabled", "true", "operands are rounded to FP8 from bfloat16 or float32",
           "use policy.precision: bfloat16");
}

}  // namespace

void check_precision(Checker c) {
  const Config& config = c.result.config;
  check_optimizer_state(c, config);
  check_loss_scaling(c, config);
  check_float16(c, config);
}

}  // namespace nrl::config_detail
