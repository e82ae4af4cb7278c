#include "core/config/validate.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <numeric>

#include "core/base/scaling.h"
#include "core/base/text.h"
#include "core/config/checker.h"
#include "core/config/fp8_recipes.h"
#include "core/config/load.h"

namespace nrl {

using config_detail::Checker;

namespace {

constexpr int64_t auto_micro_tokens = 8192;

void check_data(Checker& c, const Config& config) {
  if (config.data.train.data_path.empty())
    c.error("data.train.data_path", "data.train.data_path must be given", "",
            {"the prefix of a token file; `nrl-train prepare` makes one from text"});
  auto weights = [&](const DatasetConfig& set, const std::string& key) {
    if (set.weights && set.weights->size() != set.data_path.size() && c.sound({key + ".data_path"}))
      c.error(key + ".weights", fmt::format("{}.weights has {} numbers for {} paths", key,
                                            set.weights->size(), set.data_path.size()));
    if (std::any_of(set.data_path.begin(), set.data_path.end(),
                    [](const std::string& s) { return s.empty(); }))
      c.error(key + ".data_path", key + ".data_path holds an empty path");
  };
  weights(config.data.train, "data.train");
  weights(config.data.validation, "data.validation");
  if (config.data.split) {
    const auto& split = *config.data.split;
    if (split[0] <= 0) c.error("data.split", "data.split leaves nothing for training");
    if (!std::isfinite(split[0] + split[1] + split[2]))
      c.error("data.split", "data.split: the shares add up to infinity; give smaller numbers");
    if (!config.data.validation.data_path.empty() && split[1] > 0 && c.sound({"data.validation.data_path"}))
      c.error("data.split", "data.split and data.validation.data_path both give validation data", "",
              {fmt::format("data.validation.data_path is at {}; use one of them, or a split of \"1,0,0\"",
                           c.where("data.validation.data_path"))});
  }
  const LoopConfig& loop = resolved_loop(config);
  const bool validates = loop.val_period > 0 || loop.val_at_start || loop.val_at_end;
  const bool has_validation =
      !config.data.validation.data_path.empty() || (config.data.split && (*config.data.split)[1] > 0);
  if (validates && !has_validation && c.sound({"data.split", "data.validation.data_path"}))
    c.error(loop_key(config, loop.val_period > 0 ? "val_period"
                             : loop.val_at_start ? "val_at_start"
                                                 : "val_at_end"),
            "evaluation is enabled, but there is no validation data", "",
            {"give data.validation.data_path, or data.split: \"99,1,0\""});
}

void check_model(Checker& c, const Config& config) {
  if (config.policy.model_name && config.policy.model_name->empty())
    c.error("policy.model_name", "policy.model_name is empty");
  if (!config.policy.model_name && !c.given("policy.model.model_type") && c.sound({"policy.model_name"}))
    c.error(
        "policy.model.model_type",
        "there is no model: neither policy.model_name nor policy.model.model_type is given", "",
        {"policy.model_name: DIRECTORY starts from a Hugging Face model directory",
         "policy.model: {model_type: llama, vocab_size: 8192, hidden_size: 384, ...} starts from scratch"});
  if (config.policy.tokenizer.name && config.policy.tokenizer.name->empty())
    c.error("policy.tokenizer.name", "policy.tokenizer.name is empty");
  if (!config.policy.attention.memory_efficient)
    c.error("policy.attention.memory_efficient", "policy.attention.memory_efficient: false is not supported",
            "every attention kernel here is memory efficient; remove it");
}

// The optimizer update computes in fp32.
void check_optimizer(Checker& c, const OptimizerConfig& optimizer) {
  for (double beta : optimizer.betas)
    if (static_cast<float>(beta) >= 1)
      c.error("policy.optimizer.betas",
              fmt::format("policy.optimizer.betas: {} rounds to 1 in fp32; must stay below 1", beta));
  if (static_cast<float>(optimizer.eps) == 0)
    c.error("policy.optimizer.eps",
            fmt::format("policy.optimizer.eps: {} rounds to 0 in fp32; must stay above 0", optimizer.eps));
}

int64_t final_decay(const SchedulerConfig& s) {
  return s.lr_decay_style == LrDecayStyle::wsd ? s.lr_wsd_decay_iters.value_or(0) : 0;
}

// The shortest schedule of at least `steps` with room for the warm-up and the final decay.
int64_t schedule_with_room(const SchedulerConfig& s, int64_t steps) {
  const int64_t decay = final_decay(s);
  if (warmup_steps(s, steps) <= steps - decay) return steps;
  if (!s.warmup_ratio) return s.lr_warmup_iters + decay;
  // ratio * steps + decay <= steps, and rounding to an integer keeps that.
  constexpr double longest = 0x1p62;
  return static_cast<int64_t>(
      std::min(longest, std::ceil(static_cast<double>(decay) / (1 - *s.warmup_ratio))));
}

void check_schedule(Checker& c, const Config& config) {
  const SchedulerConfig& s = config.policy.scheduler;
  const LoopConfig& p = resolved_loop(config);
  const double lr = config.policy.optimizer.lr;
  constexpr std::string_view style_key = "policy.scheduler.lr_decay_style",
                             warmup_key = "policy.scheduler.lr_warmup_iters",
                             decay_key = "policy.scheduler.lr_decay_iters",
                             wsd_key = "policy.scheduler.lr_wsd_decay_iters",
                             min_key = "policy.scheduler.min_lr";
  const std::string steps_key = loop_key(config, "max_num_steps"),
                    epochs_key = loop_key(config, "max_num_epochs");
  if (!p.max_num_steps && !p.max_num_epochs && c.sound({epochs_key}))
    c.error(steps_key, fmt::format("{} or {} must be given", steps_key, epochs_key), "",
            {"how long to train; max_num_steps: 0 only writes the initial checkpoint"});
  // Tokens are counted in 64 bits.
  if (const double tokens = static_cast<double>(std::max<int64_t>(p.max_num_steps.value_or(1), 1)) *
                            static_cast<double>(config.policy.train_global_batch_size) *
                            static_cast<double>(config.policy.max_total_sequence_length);
      tokens > 0x1p62 && c.sound({"policy.train_global_batch_size", "policy.max_total_sequence_length"}))
    c.error(steps_key, fmt::format("the run would see {:.1e} tokens, more than can be counted", tokens), "",
            {"that is max_num_steps x train_global_batch_size x max_total_sequence_length"});
  if (s.warmup_ratio && c.given(warmup_key) && s.lr_warmup_iters > 0 && c.sound({warmup_key}))
    c.error("policy.scheduler.warmup_ratio", "the warm-up is given twice", "",
            {fmt::format("lr_warmup_iters is at {}; use one of them", c.where(warmup_key))});
  if (s.min_lr > lr && c.sound({"policy.optimizer.lr"}))
    c.error("policy.scheduler.min_lr", fmt::format("min_lr {} is above lr {}", s.min_lr, lr), "",
            {fmt::format("lr is at {}", c.where("policy.optimizer.lr"))});
  if (s.lr_decay_style == LrDecayStyle::wsd && !s.lr_wsd_decay_iters && c.sound({wsd_key}))
    c.error(style_key, "WSD needs policy.scheduler.lr_wsd_decay_iters",
            "the length of the final decay, often 10 to 20 % of the run");
  if (p.max_num_steps == 1 && s.lr_decay_style != LrDecayStyle::constant && !s.lr_decay_iters &&
      s.min_lr == 0 && c.sound({style_key, decay_key, min_key}))
    c.warning(steps_key, "the only step has a learning rate of 0: the schedule ends there",
              {fmt::format("use {}: constant, or {} of 2 or more", style_key, decay_key)});
  if (s.warmup_ratio == 1.0 && final_decay(s) > 0 && c.sound({style_key, wsd_key}))
    c.error("policy.scheduler.warmup_ratio", "warmup_ratio 1 leaves no steps for the final decay of WSD");
  if (!c.sound({style_key, warmup_key, decay_key, wsd_key, steps_key, "policy.scheduler.warmup_ratio"}))
    return;
  // A decay that ends before it can begin is a contradiction; one beyond the run is only unusual.
  if (p.max_num_steps == 0) return;
  if (s.lr_decay_iters && s.lr_decay_style != LrDecayStyle::constant) {
    const int64_t warmup = warmup_steps(s, *s.lr_decay_iters);
    if (warmup > *s.lr_decay_iters)
      c.error(warmup_key, fmt::format("the warm-up ({} steps) is longer than lr_decay_iters ({})", warmup,
                                      *s.lr_decay_iters));
    else if (warmup + final_decay(s) > *s.lr_decay_iters)
      c.error(wsd_key, fmt::format("warm-up ({}) and final decay ({}) are longer than lr_decay_iters ({})",
                                   warmup, final_decay(s), *s.lr_decay_iters));
    else if (p.max_num_steps && *s.lr_decay_iters < *p.max_num_steps)
      c.warning(decay_key, fmt::format("the rate reaches min_lr at step {}, before the last step {}",
                                       *s.lr_decay_iters, *p.max_num_steps));
  }
  if (p.max_num_steps)
    if (const std::string text = schedule_beyond_run(config, *p.max_num_steps); !text.empty())
      c.warning(s.lr_warmup_iters > *p.max_num_steps ? warmup_key
                : s.lr_decay_iters                   ? decay_key
                                                     : wsd_key,
                text, {fmt::format("max_num_steps is at {}", c.where(steps_key))});
}

// Keys that need the kind of device that the run does not have. `why`: the reason, as a note.
void check_device(Checker& c, const Config& config, bool gpu, const std::string& why) {
  const CommBackend backend = config.distributed.backend;
  // These do not change results: a configuration for either device may have them.
  const auto without_effect = [&](std::string_view key, std::string message) {
    if (config.device != DeviceKind::automatic)
      c.error(key, std::move(message), "", {why});
    else
      c.warning(key, std::move(message), {why});
  };
  config_detail::check_pin_memory(c, gpu, why);
  if (gpu) {
    if (config.memory.offload_dir)
      without_effect("memory.offload_dir",
                     "memory.offload_dir has no effect on a GPU, whose offloaded memory is page-locked");
    if (backend == CommBackend::mpi)
      c.error("distributed.backend", "distributed.backend: mpi supports host memory only", "",
              {why, "use auto, nccl, or staged, which goes through MPI"});
    return;
  }
  if (config.policy.cuda_graph)
    c.error("policy.cuda_graph", "policy.cuda_graph: true needs a GPU", "", {why});
  if (config.policy.logits_dtype == LogitsDType::bfloat16 &&
      (config.policy.precision == Precision::automatic || config.policy.precision == Precision::fastest) &&
      c.sound({"policy.logits_dtype"}))
    c.error("policy.logits_dtype", "policy.logits_dtype: bfloat16 needs policy.precision: bfloat16", "",
            {why, config.policy.precision == Precision::automatic
                      ? "policy.precision: auto is float32 on a CPU"
                      : "policy.precision: fastest is float32 on some CPUs"});
  const bool remainders = config.policy.optimizer.store_param_remainders.value_or(false) &&
                          config.policy.precision == Precision::automatic;
  const std::pair<bool, std::string> gpu_only[] = {
      {config.distributed.nccl_ub, "distributed.nccl_ub: true"},
      {config.kernels.share_device, "kernels.share_device: true"},
      {config.kernels.autotune, "kernels.autotune: true"},
      {config.kernels.tf32, "kernels.tf32: true"},
      {config.kernels.gemm_tuning.has_value(), "kernels.gemm_tuning"},
      {remainders, "policy.optimizer.store_param_remainders: true"}};
  for (const auto& [set, text] : gpu_only)
    if (set) without_effect(text.substr(0, text.find(':')), text + " has no effect without a GPU");
  if (backend == CommBackend::nccl || backend == CommBackend::staged)
    c.error("distributed.backend",
            fmt::format("distributed.backend: {} requires device: cuda", name_of(backend)), "",
            {why, "use mpi or auto"});
}

// `why`: the reason for host-staged communication.
void check_staged(Checker& c, const Config& config, const std::string& why) {
  if (config.policy.cuda_graph)
    c.error("policy.cuda_graph", "policy.cuda_graph: true cannot capture host-staged communication", "",
            {why, "it runs on the host within a step. Fix: use nccl, or policy.cuda_graph: false"});
  if (config.distributed.nccl_ub)
    c.error("distributed.nccl_ub", "distributed.nccl_ub: true has no effect on host-staged communication", "",
            {why, "use nccl, or distributed.nccl_ub: false"});
}

bool shards_parameters(ShardStrategy s) {
  return s == ShardStrategy::optim_grads_params || s == ShardStrategy::hsdp;
}

void check_param_gather(Checker& c, const Config& config) {
  constexpr std::string_view key = "distributed.overlap_param_gather";
  const ShardStrategy strategy = config.distributed.shard_strategy;
  if (!config.distributed.overlap_param_gather || !c.sound({"distributed.shard_strategy"})) return;
  if (!config.distributed.overlap_grad_reduce && !shards_parameters(strategy) &&
      c.sound({"distributed.overlap_grad_reduce"}))
    c.error(key, "distributed.overlap_param_gather: true needs distributed.overlap_grad_reduce: true");
  if (config.policy.cuda_graph && !shards_parameters(strategy) && c.sound({"policy.cuda_graph"}))
    c.error(key,
            "distributed.overlap_param_gather: true lets communication cross the end of a step, where a CUDA "
            "graph ends",
            "",
            {fmt::format("set it to false, or policy.cuda_graph, at {}, to false",
                         c.where("policy.cuda_graph"))});
}

void check_sharding(Checker& c, const Config& config) {
  check_param_gather(c, config);
  constexpr std::string_view key = "distributed.shard_strategy", copies = "distributed.dp_replicate_size";
  const DistributedConfig& d = config.distributed;
  if (d.grad_reduce_dtype == DType::e4m3 && c.sound({key}) && d.shard_strategy != ShardStrategy::ddp &&
      d.shard_strategy != ShardStrategy::optim)
    c.error(
        "distributed.grad_reduce_dtype",
        fmt::format("distributed.grad_reduce_dtype: fp8 needs distributed.shard_strategy: ddp or optim; {} "
                    "reduces every microbatch, and its errors would be as large as the gradients that it "
                    "does not keep",
                    name_of(d.shard_strategy)),
        "", {"use bf16, or another strategy"});
  if (!c.sound({key})) return;
  if (c.sound({copies}) && d.shard_strategy == ShardStrategy::hsdp && d.dp_replicate_size == 1)
    c.error(key, "distributed.shard_strategy: hsdp needs distributed.dp_replicate_size above 1", "",
            {"one copy of the shards is shard_strategy: optim_grads_params"});
  if (!shards_parameters(d.shard_strategy)) return;
  if (config.policy.cuda_graph && c.sound({"policy.cuda_graph"}))
    c.error(
        key,
        fmt::format("distributed.shard_strategy: {} releases and gathers parameters layer by layer, which "
                    "the host checks in every step; a CUDA graph replays a step without the host",
                    name_of(d.shard_strategy)),
        "",
        {fmt::format("use optim_grads, or set policy.cuda_graph, at {}, to false",
                     c.where("policy.cuda_graph"))});
  if (config.logger.sample_period > 0 && c.sound({"logger.sample_period"}))
    c.error("logger.sample_period",
            fmt::format("logger.sample_period: {} needs all parameters on rank 0, which has a shard of them",
                        config.logger.sample_period),
            "",
            {fmt::format("set it to 0 and use nrl-train generate with a checkpoint, or use another "
                         "distributed.shard_strategy than {}",
                         name_of(d.shard_strategy))});
}

void check_rest(Checker& c, const Config& config) {
  check_sharding(c, config);
  config_detail::check_context_parallel(c);
  if (config.policy.cuda_graph && config.distributed.pipeline_parallel_size > 1 &&
      c.sound({"policy.cuda_graph", "distributed.pipeline_parallel_size"}))
    c.error(
        "policy.cuda_graph",
        "policy.cuda_graph: true with distributed.pipeline_parallel_size above 1 could deadlock: neighboring "
        "stages must send at the same time, and a CUDA graph does not promise that its kernels run side by "
        "side",
        "", {"use policy.cuda_graph: false, or tensor parallelism instead of stages"});
  if (config.policy.cuda_graph && config.data.reset_attention_mask && c.sound({"policy.cuda_graph"}))
    c.error(
        "data.reset_attention_mask",
        "data.reset_attention_mask: true varies the number of sequences from step to step, but a CUDA graph "
        "launches attention for a fixed number",
        "",
        {fmt::format("set it to false, or policy.cuda_graph, at {}, to false",
                     c.where("policy.cuda_graph"))});
  if (config.device != DeviceKind::automatic && c.sound({"device"}))
    check_device(c, config, config.device == DeviceKind::cuda,
                 fmt::format("device: {} is at {}", name_of(config.device), c.where("device")));
  if (config.policy.logits_dtype == LogitsDType::bfloat16 && config.policy.precision == Precision::float32 &&
      c.sound({"policy.logits_dtype", "policy.precision"}))
    c.error("policy.logits_dtype", "policy.logits_dtype: bfloat16 needs policy.precision: bfloat16", "",
            {fmt::format("policy.precision: float32 is at {}", c.where("policy.precision"))});
  config_detail::check_recompute(c);
  config_detail::check_offload(c);
  if (!parse_step_range(config.profiling.steps))
    c.error("profiling.steps", fmt::format("profiling.steps is \"{}\"", config.profiling.steps),
            "\"FIRST:END\", counted from 1, END greater than FIRST, for example \"3:5\"");
  else if (const auto& steps = resolved_loop(config).max_num_steps;
           config.profiling.enabled && steps && parse_step_range(config.profiling.steps)->first > *steps)
    c.warning("profiling.steps",
              fmt::format("profiling.steps: the run has only {} steps, so none is traced", *steps));
  if (config.checkpointing.checkpoint_dir.empty())
    c.error("checkpointing.checkpoint_dir", "checkpointing.checkpoint_dir is empty");
  if (const ResumeFrom& from = config.checkpointing.resume;
      from.mode == ResumeMode::directory && from.directory.empty())
    c.error("checkpointing.resume", "checkpointing.resume is empty: expected auto, never or a directory");
  if (config.logger.log_dir.empty()) c.error("logger.log_dir", "logger.log_dir is empty");
  if (config.kernels.gemm_tuning && config.kernels.gemm_tuning->empty())
    c.error("kernels.gemm_tuning", "kernels.gemm_tuning is empty");
}

/// "1, 2, 4" : divisors of n, at most `count` of them, nearest to `near`.
std::string divisors_near(int64_t n, int64_t near, size_t count = 6) {
  std::vector<int64_t> all;
  for (int64_t d = 1; d * d <= n; ++d) {
    if (n % d != 0) continue;
    all.push_back(d);
    if (d * d != n) all.push_back(n / d);
  }
  std::sort(all.begin(), all.end(),
            [&](int64_t a, int64_t b) { return std::abs(a - near) < std::abs(b - near); });
  if (all.size() > count) all.resize(count);
  std::sort(all.begin(), all.end());
  std::string out;
  for (int64_t d : all) out += (out.empty() ? "" : ", ") + std::to_string(d);
  return out;
}

/// The batch keys against the number of model replicas. Unset: it is unknown; then only what must divide for
/// any number.
void check_batch(Checker& c, const Config& config, std::optional<int64_t> replicas) {
  const int64_t dp = replicas.value_or(1);
  const int64_t global = config.policy.train_global_batch_size;
  const auto& micro = config.policy.train_micro_batch_size;
  const auto& steps = config.policy.gradient_accumulation_steps;
  if (!c.sound({"policy.train_micro_batch_size", "policy.gradient_accumulation_steps"})) return;
  const int64_t factor = micro.value_or(1);
  int64_t slice = 0, product = 0;
  const bool overflow = __builtin_mul_overflow(factor, dp, &slice) ||
                        __builtin_mul_overflow(slice, steps.value_or(1), &product);
  if (overflow) {
    c.error("policy.train_micro_batch_size", "microbatch x data parallel x accumulation is too large");
    return;
  }
  std::string culprit = "policy.train_global_batch_size";
  std::vector<std::string> notes;
  const int64_t below = global / product * product, above = below + product;
  notes.push_back(fmt::format("fits: train_global_batch_size {}{}",
                              below > 0 ? fmt::format("{} or ", below) : "", above));
  if (global % dp == 0 && !micro.is_auto() && !steps)
    notes.push_back(fmt::format("or train_micro_batch_size {}", divisors_near(global / dp, factor)));
  if (steps && !micro.is_auto() && replicas) {
    if (product != global)
      c.error(
          culprit,
          fmt::format("train_global_batch_size {} is not micro {} x data parallel {} x accumulation {} = {}",
                      global, factor, dp, *steps, product),
          "",
          {fmt::format("fits: train_global_batch_size {}", product),
           "or remove gradient_accumulation_steps"});
  } else if (global % product != 0) {
    std::vector<std::string> factors;
    if (!micro.is_auto()) factors.push_back(fmt::format("micro {}", factor));
    if (replicas) factors.push_back(fmt::format("data parallel {}", dp));
    if (steps) factors.push_back(fmt::format("accumulation {}", *steps));
    c.error(culprit,
            fmt::format("train_global_batch_size {} is not a multiple of {} = {}", global,
                        fmt::join(factors, " x "), product),
            "", std::move(notes));
  }
}

int64_t model_ranks(const Config& config) {
  const DistributedConfig& d = config.distributed;
  return d.tensor_parallel_size * d.pipeline_parallel_size * d.context_parallel_size;
}

}  // namespace

int64_t warmup_steps(const SchedulerConfig& s, int64_t decay_steps) {
  return s.warmup_ratio ? std::llround(*s.warmup_ratio * static_cast<double>(decay_steps))
                        : s.lr_warmup_iters;
}

int64_t decay_end(const SchedulerConfig& scheduler, int64_t steps) {
  return scheduler.lr_decay_iters.value_or(schedule_with_room(scheduler, steps));
}

std::string schedule_beyond_run(const Config& config, int64_t steps) {
  const SchedulerConfig& s = config.policy.scheduler;
  if (s.lr_warmup_iters > steps)
    return fmt::format(
        "the warm-up ({} steps) is longer than the run ({}): the schedule is unchanged, so the last step "
        "uses {} % "
        "of lr and there is no decay",
        s.lr_warmup_iters, steps, 100 * steps / s.lr_warmup_iters);
  if (s.lr_decay_style != LrDecayStyle::constant && decay_end(s, steps) > steps)
    return fmt::format(
        "the schedule ({} steps) is longer than the run ({}): it is unchanged, so the run ends before "
        "min_lr is reached",
        decay_end(s, steps), steps);
  return "";
}

namespace config_detail {

Diagnostics validate(const ConfigResult& result) {
  Diagnostics out;
  Checker c{result, out};
  const Config& config = result.config;
  check_model(c, config);
  check_data(c, config);
  check_precision(c);
  check_optimizer(c, config.policy.optimizer);
  check_schedule(c, config);
  check_rest(c, config);
  check_tensor_parallel(c);
  check_fp8(c);
  check_pipeline(c);
  if (const auto& replicas = config.distributed.data_parallel_size;
      c.sound({"distributed.data_parallel_size"}))
    check_batch(c, config, replicas.is_auto() ? std::nullopt : std::optional(replicas.value()));
  return out;
}

}  // namespace config_detail

namespace {

// The ranks of a pipeline stage, over which experts are divided.
void check_expert_grid(Checker& c, const DistributedConfig& d, int64_t world) {
  constexpr const char *experts = "distributed.expert_parallel_size",
                       *parts = "distributed.expert_tensor_parallel_size";
  if (!c.sound({experts, parts})) return;
  const int64_t stage = world / d.pipeline_parallel_size;
  const int64_t group = d.expert_parallel_size * d.expert_tensor_parallel_size;
  if (stage % group == 0) return;
  c.error(
      d.expert_parallel_size > 1 ? experts : parts,
      fmt::format("expert_parallel_size {} x expert_tensor_parallel_size {} = {} does not divide the {} "
                  "rank{} of tensor, context and data parallelism",
                  d.expert_parallel_size, d.expert_tensor_parallel_size, group, stage, stage == 1 ? "" : "s"),
      "", {fmt::format("divisors of {}: {}", stage, divisors_near(stage, group))});
}

}  // namespace

Diagnostics validate_for_world(const ConfigResult& result, int world_size, std::span<const ClusterNode> nodes,
                               RankCount count) {
  Diagnostics out;
  Checker c{result, out};
  const Config& config = result.config;
  const int64_t world = world_size;
  config_detail::check_cluster(c, world, nodes, count);
  const DistributedConfig& d = config.distributed;
  const int64_t replica = model_ranks(config);
  if (!c.sound({"distributed.tensor_parallel_size", "distributed.pipeline_parallel_size",
                "distributed.context_parallel_size"}))
    return out;
  if (world % replica != 0) {
    c.error(c.given("distributed.pipeline_parallel_size") ? "distributed.pipeline_parallel_size"
                                                          : "distributed.tensor_parallel_size",
            fmt::format(
                "{} ranks do not fit the grid: tensor {} x pipeline {} x context {} = {}, and {} is not a "
                "multiple of {}",
                world, d.tensor_parallel_size, d.pipeline_parallel_size, d.context_parallel_size, replica,
                world, replica),
            "",
            {world < replica
                 ? config_detail::with_ranks(replica, count)
                 : fmt::format("{} or {}", config_detail::with_ranks(world / replica * replica, count),
                               (world / replica + 1) * replica)});
    return out;
  }
  if (d.backend == CommBackend::staged && world > 1 && c.sound({"distributed.backend"}))
    check_staged(c, config,
                 fmt::format("distributed.backend: staged is at {}", c.where("distributed.backend")));
  const int64_t dp = world / replica;
  if (!c.sound({"distributed.data_parallel_size"})) return out;
  if (!d.data_parallel_size.is_auto() && d.data_parallel_size.value() != dp) {
    c.error(
        "distributed.data_parallel_size",
        fmt::format("data_parallel_size is {}, but {} rank{} / (tensor {} x pipeline {} x context {}) = {}",
                    d.data_parallel_size.value(), world, world == 1 ? "" : "s", d.tensor_parallel_size,
                    d.pipeline_parallel_size, d.context_parallel_size, dp),
        "",
        {fmt::format("remove it (auto), or {}",
                     config_detail::with_ranks(d.data_parallel_size.value() * replica, count))});
    return out;
  }
  if (const int64_t copies = d.dp_replicate_size;
      copies > 1 && (dp % copies != 0 || copies >= dp) && c.sound({"distributed.dp_replicate_size"}))
    c.error(
        "distributed.dp_replicate_size",
        fmt::format("distributed.dp_replicate_size: {} does not divide {} data-parallel rank{} into slices "
                    "of 2 or more",
                    copies, dp, dp == 1 ? "" : "s"),
        "", {fmt::format("divisors of {}: {}", dp, divisors_near(dp, copies))});
  check_expert_grid(c, d, world);
  check_batch(c, config, dp);
  if (out.empty()) check_sequence_parallel(c, world_size);
  return out;
}

Diagnostics validate_for_device(const ConfigResult& result, const DeviceFacts& facts) {
  Diagnostics out;
  Checker c{result, out};
  const Config& config = result.config;
  if (!c.sound({"device"})) return out;
  if (config.device == DeviceKind::cuda && !facts.gpu)
    c.error("device", fmt::format("device: cuda, but {}", facts.why), "",
            {"use device: cpu or auto, or see nrl-train doctor"});
  if (!config.kernels.isa.is_auto() && config.kernels.isa.value() > facts.best_isa)
    c.error("kernels.isa",
            fmt::format("kernels.isa: {} is not supported by the processor of every rank",
                        name_of(config.kernels.isa.value())),
            "",
            {fmt::format("the best that all support is {}; use it or auto, or see nrl-train doctor",
                         name_of(facts.best_isa))});
  for (Diagnostic& d : out) d.exit = Exit::unavailable;
  if (config.policy.precision == Precision::fastest && config.kernels.isa.is_auto() && !facts.gpu &&
      facts.bf16_differs)
    c.error("policy.precision",
            "policy.precision: fastest is bfloat16 on some ranks' processors and float32 on others", "",
            {"use bfloat16 or float32, or one kernels.isa for all"});
  // With an explicit device, check_device() ran when the configuration was loaded.
  if (config.device == DeviceKind::automatic)
    check_device(c, config, facts.gpu, "device: auto: " + facts.why);
  if (!facts.staged_why.empty()) check_staged(c, config, "the ranks use staged: " + facts.staged_why);
  return out;
}

namespace {

int64_t microbatch_unit(const Config& config) {
  const DistributedConfig& d = config.distributed;
  const Fp8Config& fp8 = config.policy.fp8_cfg;
  const int64_t rows = std::lcm(fp8.enabled ? row_unit(rules_of(fp8.fp8_recipe).input) : 1,
                                d.splits_sequence() ? d.tensor_parallel_size : 1);
  return rows / std::gcd(rows, config.policy.max_total_sequence_length / d.context_parallel_size);
}

// The largest divisor of `all` up to `most` that is a multiple of `unit`; else the least such one, else the
// largest up to `most`.
int64_t choose_microbatch(int64_t all, int64_t most, int64_t unit) {
  int64_t divisor = most;
  if (all % unit == 0) {
    const int64_t units = all / unit;
    divisor = std::max<int64_t>(most / unit, 1);
    while (units % divisor != 0) --divisor;
    return divisor * unit;
  }
  while (all % divisor != 0) --divisor;
  return divisor;
}

}  // namespace

BatchPlan resolve_batch(const Config& config, int world_size) {
  BatchPlan plan;
  plan.unit = microbatch_unit(config);
  plan.data_parallel = world_size / model_ranks(config);
  plan.global = config.policy.train_global_batch_size;
  const int64_t per_replica = plan.global / plan.data_parallel;
  const int64_t sequence = config.policy.max_total_sequence_length;
  if (!config.policy.train_micro_batch_size.is_auto()) {
    plan.micro = config.policy.train_micro_batch_size.value();
  } else if (config.policy.gradient_accumulation_steps) {
    plan.micro = per_replica / *config.policy.gradient_accumulation_steps;
  } else {
    // Four microbatches per stage leave a bubble of less than a fifth.
    const int64_t stages = config.distributed.pipeline_parallel_size;
    const int64_t most = stages == 1 ? per_replica : std::max<int64_t>(per_replica / (4 * stages), 1);
    plan.micro =
        choose_microbatch(per_replica, std::clamp<int64_t>(auto_micro_tokens / sequence, 1, most), plan.unit);
  }
  plan.accumulation = per_replica / plan.micro;
  plan.tokens_per_step = plan.global * sequence;
  NRL_CHECK(plan.micro * plan.accumulation * plan.data_parallel == plan.global,
            "batch arithmetic was not validated");
  return plan;
}

}  // namespace nrl
