// Rules about the model and its data, the length and the batch of the run, and its outputs.
#include <cmath>
#include <cstdio>

#include "core/base/cpu_list.h"
#include "core/base/text.h"
#include "core/config/alert_rule.h"
#include "core/config/rules/tables.h"
#include "core/config/time_span.h"

namespace nrl::config_detail {
namespace {

constexpr const char *steps = "loop.max_num_steps", *warmup = "policy.scheduler.lr_warmup_iters",
                     *ratio = "policy.scheduler.warmup_ratio", *decay = "policy.scheduler.lr_decay_iters",
                     *wsd = "policy.scheduler.lr_wsd_decay_iters", *style = "policy.scheduler.lr_decay_style";

std::string format_advice(Algorithm algorithm, ExampleFormat format) {
  const std::string_view of_format = format == ExampleFormat::tokens       ? "pretrain"
                                     : format == ExampleFormat::preference ? "dpo or rm"
                                     : format == ExampleFormat::rollouts || format == ExampleFormat::prompts
                                         ? "grpo or distill"
                                         : "sft";
  return fmt::format("{}; or set algorithm: {}",
                     algorithm == Algorithm::pretrain ? "nrl-train prepare makes token files from text"
                                                      : "docs/examples.md describes the records",
                     of_format);
}

ConfigRule dataset(const std::string& set, DatasetConfig DataConfig::*member) {
  return {{set + ".data_path"}, [=](const ConfigResult& r) {
            const auto& [paths, weights, format] = r.config.data.*member;
            Verdict out;
            if (const std::string why = format_refusal(r.config.algorithm, format); !why.empty())
              out.push_back({.reason = fmt::format("{}.format: {}, but {}", set, name_of(format), why),
                             .remedy = {format_advice(r.config.algorithm, format)},
                             .key = set + ".format"});
            if (weights && weights->size() != paths.size())
              out.push_back({.reason = fmt::format("{}.weights has {} numbers for {} paths", set,
                                                   weights->size(), paths.size()),
                             .key = set + ".weights"});
            if (std::find(paths.begin(), paths.end(), "") != paths.end())
              out.push_back({set + ".data_path holds an empty path"});
            return out;
          }};
}

Verdict judge_model(const ConfigResult& r) {
  if (r.config.policy.model_name || r.given("policy.model.model_type")) return {};
  return {
      {"there is no model: neither policy.model_name nor policy.model.model_type is given",
       {"policy.model_name: DIRECTORY starts from a Hugging Face model directory",
        "policy.model: {model_type: llama, vocab_size: 8192, hidden_size: 384, ...} starts from scratch"}}};
}

bool splits_off_validation(const Config& c) {
  return c.data.split && (*c.data.split)[1] > 0;
}

Verdict judge_validation(const ConfigResult& r) {
  const LoopConfig& loop = resolved_loop(r.config);
  const char* key = loop.val_period > 0 ? "val_period"
                    : loop.val_at_start ? "val_at_start"
                    : loop.val_at_end   ? "val_at_end"
                                        : nullptr;
  if (!key || !r.config.data.validation.data_path.empty() || splits_off_validation(r.config)) return {};
  return {
      {.reason = "evaluation is enabled, but there is no validation data",
       .remedy = {trains_on_examples(r.config) ? "give data.validation.data_path"
                                               : "give data.validation.data_path, or data.split: \"99,1,0\""},
       .key = loop_key(r.config, key)}};
}

Verdict judge_packed_tokens(const ConfigResult& r) {
  const PolicyConfig& p = r.config.policy;
  const auto tokens = packed_tokens(p);
  if (!tokens) return {};
  const std::string key = fmt::format("policy.{}.train_mb_tokens",
                                      p.sequence_packing.enabled ? "sequence_packing" : "dynamic_batching");
  const int64_t length = example_tokens(r.config), below = *tokens / length * length;
  if (*tokens % length != 0)
    return {
        {.reason = fmt::format("{}: {} is not a multiple of {}policy.max_total_sequence_length, {}", key,
                               *tokens, length > p.max_total_sequence_length ? "2 x " : "", length),
         .remedy = {fmt::format("fits: {}{}", below > 0 ? fmt::format("{} or ", below) : "", below + length)},
         .key = key}};
  if (p.train_micro_batch_size.value_or(*tokens / length) != *tokens / length)
    return {
        {.reason = fmt::format("{}: {} and policy.train_micro_batch_size: {} x {} tokens are two sizes of a "
                               "microbatch",
                               key, *tokens, p.train_micro_batch_size.value(), length),
         .remedy = {"remove one of them"},
         .key = key}};
  if (p.gradient_accumulation_steps)
    return {{.reason = fmt::format("{} leaves the number of microbatches open, but "
                                   "policy.gradient_accumulation_steps is {}",
                                   key, *p.gradient_accumulation_steps),
             .remedy = {"remove one of them"},
             .key = key}};
  return {};
}

Verdict judge_date(const ConfigResult& r) {
  const auto& date = r.config.data.template_date;
  if (!date) return {};
  int year = 0, month = 0, day = 0, end = 0;
  if (std::sscanf(date->c_str(), "%4d-%2d-%2d%n", &year, &month, &day, &end) == 3 &&
      end == static_cast<int>(date->size()) && month >= 1 && month <= 12 && day >= 1 && day <= 31)
    return {};
  return {{.reason = fmt::format("data.template_date is \"{}\"", *date),
           .label = "YYYY-MM-DD, for example 2026-07-31"}};
}

// The optimizer update computes in fp32.
Verdict judge_betas(const ConfigResult& r) {
  Verdict out;
  for (const double beta : r.config.policy.optimizer.betas)
    if (static_cast<float>(beta) >= 1)
      out.push_back({fmt::format("policy.optimizer.betas: {} rounds to 1 in fp32; must stay below 1", beta)});
  return out;
}

Verdict judge_length(const ConfigResult& r) {
  const LoopConfig& loop = resolved_loop(r.config);
  if (loop.max_num_steps || loop.max_num_epochs) return {};
  return {{fmt::format("{} or {} must be given", loop_key(r.config, "max_num_steps"),
                       loop_key(r.config, "max_num_epochs")),
           {"how long to train; max_num_steps: 0 only writes the initial checkpoint"}}};
}

// Tokens are counted in 64 bits.
Verdict judge_tokens(const ConfigResult& r) {
  const PolicyConfig& p = r.config.policy;
  const auto number =
      static_cast<double>(std::max<int64_t>(resolved_loop(r.config).max_num_steps.value_or(1), 1));
  const double tokens = number * static_cast<double>(p.train_global_batch_size) *
                        static_cast<double>(p.max_total_sequence_length);
  if (tokens <= 0x1p62) return {};
  return {{fmt::format("the run would see {:.1e} tokens, more than can be counted", tokens),
           {"that is max_num_steps x train_global_batch_size x max_total_sequence_length"}}};
}

Verdict judge_min_lr(const ConfigResult& r) {
  const double lr = r.config.policy.optimizer.lr, min_lr = r.config.policy.scheduler.min_lr;
  if (min_lr <= lr) return {};
  return {{fmt::format("min_lr {} is above lr {}", min_lr, lr),
           {fmt::format("lr is at {}", r.where("policy.optimizer.lr"))}}};
}

// A decay that ends before it can begin is a contradiction; one beyond the run is only unusual.
Verdict judge_decay(const ConfigResult& r) {
  const SchedulerConfig& s = r.config.policy.scheduler;
  const auto number = resolved_loop(r.config).max_num_steps;
  if (number == 0 || !s.lr_decay_iters || !s.ends()) return {};
  const int64_t end = *s.lr_decay_iters, first = warmup_steps(s, end);
  if (first > end)
    return {{.reason = fmt::format("the warm-up ({} steps) is longer than lr_decay_iters ({})", first, end)}};
  if (first + s.final_decay() > end)
    return {{.reason = fmt::format("warm-up ({}) and final decay ({}) are longer than lr_decay_iters ({})",
                                   first, s.final_decay(), end),
             .key = wsd}};
  if (number && end < *number)
    return {
        {.reason = fmt::format("the rate reaches min_lr at step {}, before the last step {}", end, *number),
         .key = decay,
         .severity = Severity::warning}};
  return {};
}

Verdict judge_run(const ConfigResult& r) {
  const SchedulerConfig& s = r.config.policy.scheduler;
  const int64_t number = resolved_loop(r.config).max_num_steps.value_or(0);
  const std::string text = number == 0 ? "" : schedule_beyond_run(r.config, number);
  if (text.empty()) return {};
  return {{.reason = text,
           .remedy = {fmt::format("max_num_steps is at {}", r.where(loop_key(r.config, "max_num_steps")))},
           .key = s.lr_warmup_iters > number ? warmup
                  : s.lr_decay_iters         ? decay
                                             : wsd,
           .severity = Severity::warning}};
}

Verdict judge_profile(const ConfigResult& r) {
  const ProfilingConfig& p = r.config.profiling;
  const auto range = parse_step_range(p.steps);
  if (!range)
    return {{.reason = fmt::format("profiling.steps is \"{}\"", p.steps),
             .label = "\"FIRST:END\", counted from 1, END greater than FIRST, for example \"3:5\""}};
  if (p.every && *p.every < range->end - range->first)
    return {{.reason = fmt::format("profiling.every is {}, fewer than the {} steps of profiling.steps",
                                   *p.every, range->end - range->first),
             .key = "profiling.every"}};
  const auto number = [](const std::string& text) {
    return !text.empty() && text.size() < 8 && text.find_first_not_of("0123456789") == text.npos;
  };
  const bool word = p.ranks.size() == 1 && (p.ranks[0] == "auto" || p.ranks[0] == "all");
  if (p.ranks.empty() || (!word && !std::all_of(p.ranks.begin(), p.ranks.end(), number)))
    return {{.reason = fmt::format("profiling.ranks is [{}]", fmt::join(p.ranks, ", ")),
             .label = "auto, all, or numbers of ranks",
             .key = "profiling.ranks"}};
  const auto& steps = resolved_loop(r.config).max_num_steps;
  if (!p.enabled || !steps || range->first <= *steps) return {};
  return {{.reason = fmt::format("profiling.steps: the run has only {} steps, so none is traced", *steps),
           .severity = Severity::warning}};
}

/// A run that goes back needs a checkpoint from before the instability, not only the newest one.
ConfigRule needs_checkpoints(const char* key, const char* value) {
  return row({is("monitoring.stability.on_instability", {"rollback"}), is(key, {value})},
             {fmt::format(
                  "monitoring.stability.on_instability: rollback has no checkpoint to go back to with {}: {}",
                  key, value),
              {"set checkpointing.save_period, keep_latest_k: 2 or more, or on_instability: skip_step"}});
}

Verdict judge_must_save_by(const ConfigResult& r) {
  const auto& text = r.config.checkpointing.checkpoint_must_save_by;
  if (!text) return {};
  const auto span = parse_time_span(*text);
  if (span && *span > 0) return {};
  return {{.reason = fmt::format("checkpointing.checkpoint_must_save_by: \"{}\" is no span of time",
                                 clipped(*text)),
           .label = "DD:HH:MM:SS; \"00:03:45:00\" is three hours and three quarters"}};
}

Verdict judge_after_save(const ConfigResult& r) {
  const std::vector<std::string>& words = r.config.checkpointing.after_save;
  if (words.empty() || !words.front().empty()) return {};
  return {{.reason = "checkpointing.after_save: the name of the program is empty"}};
}

Verdict judge_alert_rules(const ConfigResult& r) {
  for (const std::string& text : r.config.monitoring.alerting.rules) {
    const auto [rule, problem] = parse_alert_rule(text);
    if (!problem.empty())
      return {{.reason = fmt::format("monitoring.alerting.rules: \"{}\": {}", clipped(text), problem),
               .label = "METRIC < NUMBER or METRIC > NUMBER, and \" for N\" after N evaluations in a row"}};
    const bool sampled = rule.metric.starts_with("node.") || rule.metric.starts_with("rank.");
    if (sampled && !r.config.logger.monitor_gpus)
      return {{.reason = fmt::format("monitoring.alerting.rules: {} is not sampled", rule.metric),
               .remedy = {"write logger.monitor_gpus: true"}}};
  }
  return {};
}

// Whoever has the address can post, and configurations are printed and copied.
Verdict judge_webhook(const ConfigResult& r) {
  const std::string webhook = r.config.monitoring.alerting.webhook.value_or("env:");
  if (webhook.starts_with("env:") || webhook.starts_with("file:/") || webhook.starts_with("http://"))
    return {};
  return {
      {.reason = "monitoring.alerting.webhook: the address is a secret, which a configuration must not hold",
       .remedy = {"put it into an environment variable, and write monitoring.alerting.webhook: env:NAME"},
       .label = "expected env:NAME or file:/PATH"}};
}

Verdict judge_binding(const ConfigResult& r) {
  const std::string& binding = r.config.kernels.cpu_binding;
  if (binding == "none" || binding == "auto" || parse_cpu_list(binding)) return {};
  return {{.reason = fmt::format("kernels.cpu_binding: \"{}\" is no list of CPUs", clipped(binding)),
           .label = "expected auto, none, or CPUs such as \"0-3,8\""}};
}

Verdict judge_samples(const ConfigResult& r) {
  const DistributedConfig& d = r.config.distributed;
  if (r.config.logger.sample_period == 0) return {};
  for (const auto& [key, ranks, part] :
       {std::tuple(key::tensor, d.tensor_parallel_size, "a part of every matrix"),
        std::tuple("distributed.expert_parallel_size", d.expert_parallel_size, "a part of the experts"),
        std::tuple("distributed.expert_tensor_parallel_size", d.expert_tensor_parallel_size,
                   "a part of every expert")})
    if (ranks > 1 && r.sound(key))
      return {
          {fmt::format("logger.sample_period needs the whole model on one rank, which has {}", part),
           {fmt::format("{} is at {}; set sample_period to 0 and use nrl-train generate with a checkpoint",
                        key, r.where(key))}}};
  return {};
}

bool names_a_server(const Config& c) {
  const std::string uri = c.logger.mlflow.tracking_uri.value_or("");
  return uri == "databricks" || (uri.find("://") != std::string::npos && !uri.starts_with("file:///"));
}

const ConfigRule training_table[] = {
    not_empty({"policy.model_name"}),
    {{"policy.model.model_type", "policy.model_name"}, judge_model},
    not_empty({"policy.tokenizer.name"}),
    row({is("policy.attention.memory_efficient", {"false"})},
        {.reason = "policy.attention.memory_efficient: false is not supported",
         .label = "every attention kernel here is memory efficient; remove it"}),
    not_empty(
        {"data.train.data_path"}, "data.train.data_path must be given",
        {"the prefix of a token file, which `nrl-train prepare` makes from text; for other algorithms than "
         "pretrain a file of JSON lines"}),
    row({is("policy.sequence_packing.enabled", {"true"}), is("policy.dynamic_batching.enabled", {"true"})},
        {"policy.sequence_packing and policy.dynamic_batching both say how microbatches are filled",
         {"set one of them to false; packing needs fewer microbatches"}}),
    {{"policy.sequence_packing.train_mb_tokens", "policy.sequence_packing.enabled",
      "policy.dynamic_batching.train_mb_tokens", "policy.dynamic_batching.enabled", key::length,
      "policy.train_micro_batch_size", "policy.gradient_accumulation_steps"},
     judge_packed_tokens},
    not_empty({"policy.tokenizer.chat_template"}),
    not_empty({"data.chat_key"}),
    not_empty({"data.input_key"}),
    not_empty({"data.output_key"}),
    {{"data.template_date"}, judge_date},
    dataset("data.train", &DataConfig::train),
    dataset("data.validation", &DataConfig::validation),
    row({"data.split"}, [](const Config& c) { return c.data.split && (*c.data.split)[0] <= 0; },
        {"data.split leaves nothing for training"}),
    row({"data.split"},
        [](const Config& c) {
          const auto split = c.data.split.value_or(std::array<double, 3>{});
          return !std::isfinite(split[0] + split[1] + split[2]);
        },
        {"data.split: the shares add up to infinity; give smaller numbers"}),
    row({"data.split", "data.validation.data_path"},
        [](const Config& c) { return splits_off_validation(c) && !c.data.validation.data_path.empty(); },
        {"data.split and data.validation.data_path both give validation data",
         {"data.validation.data_path is at <@data.validation.data_path>; use one of them, or a split of "
          "\"1,0,0\""}}),
    {{"data.split", "data.validation.data_path"}, judge_validation},
    {{"policy.optimizer.betas"}, judge_betas},
    row({"policy.optimizer.eps"},
        [](const Config& c) { return static_cast<float>(c.policy.optimizer.eps) == 0; },
        {"<:policy.optimizer.eps> rounds to 0 in fp32; must stay above 0"}),
    {{steps, "loop.max_num_epochs"}, judge_length},
    {{steps, "policy.train_global_batch_size", key::length}, judge_tokens},
    row({is_not(ratio, "null"), is_not(warmup, "0")},
        {"the warm-up is given twice",
         {"lr_warmup_iters is at <@policy.scheduler.lr_warmup_iters>; use one of them"}}),
    {{"policy.scheduler.min_lr", "policy.optimizer.lr"}, judge_min_lr},
    row({is(style, {"WSD"}), is(wsd, {"null"})},
        {.reason = "WSD needs policy.scheduler.lr_wsd_decay_iters",
         .label = "the length of the final decay, often 10 to 20 % of the run"}),
    row({is(style, {"step"}), is("policy.scheduler.lr_step_iters", {"null"})},
        {.reason = "step needs policy.scheduler.lr_step_iters", .label = "the steps between two reductions"}),
    row({is(style, {"cyclical"}), is("policy.scheduler.lr_cycle_iters", {"null"})},
        {.reason = "cyclical needs policy.scheduler.lr_cycle_iters", .label = "the steps of a cycle"}),
    row({is(steps, {"1"}), is(style, {"linear", "cosine", "WSD", "inverse-square-root"}), is(decay, {"null"}),
         is("policy.scheduler.min_lr", {"0"})},
        {.reason = "the only step has a learning rate of 0: the schedule ends there",
         .remedy = {"use policy.scheduler.lr_decay_style: constant, or policy.scheduler.lr_decay_iters of 2 "
                    "or more"},
         .severity = Severity::warning}),
    row({is(ratio, {"1"}), is(style, {"WSD"}), is_not(wsd, "null"), is_not(wsd, "0")},
        {"warmup_ratio 1 leaves no steps for the final decay of WSD"}),
    {{warmup, ratio, decay, wsd, style, steps}, judge_decay},
    {{warmup, ratio, decay, wsd, style, steps}, judge_run},
    {{"profiling.steps", "profiling.every", "profiling.ranks"}, judge_profile},
    {{"checkpointing.checkpoint_must_save_by"}, judge_must_save_by},
    {{"checkpointing.after_save"}, judge_after_save},
    {{"monitoring.alerting.rules", "logger.monitor_gpus"}, judge_alert_rules},
    {{"monitoring.alerting.webhook"}, judge_webhook},
    needs_checkpoints("checkpointing.enabled", "false"),
    needs_checkpoints("checkpointing.save_period", "0"),
    needs_checkpoints("checkpointing.keep_latest_k", "1"),
    needs_checkpoints("checkpointing.save_optimizer", "false"),
    row({is("monitoring.alerting.slack_notifications", {"true"}),
         is("monitoring.alerting.webhook", {"null"})},
        {"monitoring.alerting.slack_notifications: there is no address to post alerts to",
         {"write monitoring.alerting.webhook: env:NAME, the name of a variable that has the address"}}),
    row({is("monitoring.alerting.email_notifications", {"true"}),
         is("monitoring.alerting.command", {"null"})},
        {"monitoring.alerting.email_notifications: nrl-train sends no mail itself",
         {"write monitoring.alerting.command: 'mail -s \"$NRL_ALERT_MESSAGE\" ADDRESS'"}}),
    not_empty({"monitoring.visualization.bind"}),
    {{"kernels.cpu_binding"}, judge_binding},
    not_empty({"checkpointing.checkpoint_dir"}),
    not_empty({"checkpointing.resume"}, "checkpointing.resume is empty: expected auto, never or a directory"),
    not_empty({"logger.log_dir"}),
    not_empty({"logger.tensorboard.log_dir"}),
    not_empty({"logger.mlflow.tracking_uri"}),
    row({"logger.mlflow.tracking_uri"}, names_a_server,
        {.reason = "<:logger.mlflow.tracking_uri>: only directories are supported",
         .remedy =
             {"remove it, or give a directory; after the run, mlflow migrate-filestore moves it into the "
              "database of a server"}}),
    row({is_not("logger.layer_stats_period", "0"), is("policy.precision", {"float16"})},
        {"<:logger.layer_stats_period> does not go with policy.precision: float16",
         {"sizes of activations are summed in float32 and bfloat16 only",
          "Fix: policy.precision: bfloat16, or logger.layer_stats_period: 0"}}),
    row({is_not(key::samples, "0"), is("policy.precision", {"float16"})},
        {"<:logger.sample_period> does not go with policy.precision: float16",
         {"text is generated in float32 or bfloat16",
          "set it to 0 and use nrl-train generate with a checkpoint, which computes in fp32"}}),
    row({is_not(key::samples, "0"), is(key::sharding, {"optim_grads_params", "hsdp"})},
        {"<:logger.sample_period> needs all parameters on rank 0, which has a shard of them",
         {"set it to 0 and use nrl-train generate with a checkpoint, or use another "
          "distributed.shard_strategy than <distributed.shard_strategy>"}}),
    {{key::samples}, judge_samples},
    // The other strategies with shards refuse samples with any weights.
    row({is_not(key::samples, "0"), is("policy.fp8_cfg.enabled", {"true"}),
         is("policy.fp8_cfg.fp8_param", {"true"}), is(key::sharding, {"optim", "optim_grads"})},
        {"<:logger.sample_period> needs all parameters on rank 0, which has them in FP8 and a shard of "
         "others",
         {"set it to 0 and use nrl-train generate with a checkpoint, or set policy.fp8_cfg.fp8_param to "
          "false"}}),
    row({is_not(key::samples, "0"), is_not(key::stages, "1")},
        {"logger.sample_period: no rank has all layers to generate text with",
         {"<=distributed.pipeline_parallel_size>",
          "set it to 0, and use nrl-train generate on a checkpoint"}}),
    {{"policy.train_micro_batch_size", "policy.gradient_accumulation_steps",
      "distributed.data_parallel_size"},
     [](const ConfigResult& r) {
       const auto& replicas = r.config.distributed.data_parallel_size;
       return judge_batch(r.config, replicas.is_auto() ? std::nullopt : std::optional(replicas.value()));
     }},
};

}  // namespace

std::span<const ConfigRule> training_rules() {
  return training_table;
}

}  // namespace nrl::config_detail
