#include "apps/train/start/evaluation_config.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "apps/check/check.h"
#include "apps/state/adapter_files.h"
#include "apps/train/launch/device_choice.h"
#include "core/base/error.h"
#include "core/io/atomic_file.h"
#include "core/io/json.h"

namespace nrl::train {
namespace {

constexpr std::string_view format_key = "data.validation.format";
constexpr int64_t longest_default = 1024;  // tokens, for models of other programs

// Keys, and sections that end in a dot, of the command line.
constexpr std::string_view layout_keys[] = {"distributed.backend",
                                            "distributed.tensor_parallel_size",
                                            "distributed.sequence_parallel",
                                            "distributed.tp_comm_overlap",
                                            "distributed.tp_comm_overlap_splits",
                                            "distributed.pipeline_parallel_size",
                                            "distributed.virtual_pipeline_size",
                                            "distributed.num_layers_in_first_pipeline_stage",
                                            "distributed.num_layers_in_last_pipeline_stage",
                                            "distributed.account_for_embedding_in_pipeline_split",
                                            "distributed.account_for_loss_in_pipeline_split",
                                            "distributed.pipeline_layout",
                                            "distributed.context_parallel_size",
                                            "distributed.cp_comm_type",
                                            "distributed.hierarchical_context_parallel_sizes",
                                            "distributed.expert_parallel_size",
                                            "distributed.expert_tensor_parallel_size",
                                            "distributed.data_parallel_size",
                                            "distributed.shard_strategy",
                                            "distributed.dp_replicate_size",
                                            "distributed.bucket_size_mb",
                                            "distributed.model_parallel",
                                            "device",
                                            "kernels.",
                                            "cluster."};
// With examples. Those before data.cache_dir are taken from the run that saved the model.
constexpr std::string_view example_keys[] = {"data.train_on",
                                             "data.chat_key",
                                             "data.input_key",
                                             "data.output_key",
                                             "data.system_prompt_file",
                                             "data.prompt_file",
                                             "data.special_tokens_in_text",
                                             "data.on_bad_record",
                                             "data.template_date",
                                             "policy.on_overlong",
                                             format_key,
                                             "data.cache_dir",
                                             "policy.tokenizer."};

bool among(std::span<const std::string_view> keys, std::string_view key) {
  return std::any_of(keys.begin(), keys.end(),
                     [&](std::string_view k) { return k.ends_with('.') ? key.starts_with(k) : key == k; });
}

std::string quoted(const std::string& text) {
  return JsonValue(text).dump();
}

/// The configuration of the run that saved a checkpoint; unset for other directories.
std::optional<Config> saved_config(const std::string& directory) {
  const std::string path = join_path(directory, "nrl-train.yaml");
  if (!path_exists(path)) return std::nullopt;
  const ConfigResult saved = load_config(path, {});
  return saved.ok() ? std::optional(saved.config) : std::nullopt;
}

int64_t length_of(const EvaluationOptions& options, const model::ModelSpec& spec,
                  const std::optional<Config>& saved) {
  int64_t length = options.sequence_length;
  if (length == 0 && saved) length = saved->policy.max_total_sequence_length;
  if (length == 0)
    length = std::min(longest_default, spec.max_positions > 0 ? spec.max_positions : longest_default);
  if (spec.learned_positions && length > spec.max_positions)
    fail(Exit::usage, "--sequence-length {}: the model has {} positions", length, spec.max_positions);
  return length;
}

/// The settings of the evaluation that are not the user's, as overrides.
std::vector<std::string> own_settings(const EvaluationOptions& options, const std::optional<Config>& saved,
                                      int64_t length) {
  const std::string& directory = options.directory;
  const std::string model =
      is_adapter(directory) ? base_directory(directory, read_adapter(directory)) : directory;
  std::vector<std::string> out{
      "policy.model_name=" + quoted(model), fmt::format("policy.max_total_sequence_length={}", length),
      "data.train.data_path=evaluated",     fmt::format("device={}", name_of(options.device)),
      "checkpointing.enabled=false",        "loop.max_num_steps=1"};
  if (options.threads > 0) out.push_back(fmt::format("kernels.num_threads={}", options.threads));
  if (!options.examples) return out;
  out.insert(out.end(), {"policy.sequence_packing.enabled=true", "data.validation.data_path=evaluated",
                         "loop.val_at_end=true"});
  if (!saved || !trains_on_examples(*saved)) return out;
  for (const std::string_view key : example_keys) {
    if (key == "data.cache_dir") break;
    const std::string value = value_text(*saved, key);
    const bool rollouts = key == format_key && saved->data.validation.format == ExampleFormat::rollouts;
    if (value != value_text({}, key) && !rollouts) out.push_back(fmt::format("{}={}", key, value));
  }
  // A checkpoint has the template that its run used, which is then the default.
  if (saved->policy.tokenizer.chat_template == "none")
    out.emplace_back("policy.tokenizer.chat_template=none");
  return out;
}

/// An algorithm that reads the files. `settings`: the last one of a key counts.
std::string_view algorithm_for(const EvaluationOptions& options, std::span<const std::string> settings) {
  if (!options.examples) return "pretrain";
  std::string_view format;
  for (const std::string_view setting : settings)
    if (setting.starts_with(format_key)) format = setting;
  return format.ends_with("=preference") ? "dpo" : "sft";
}

/// Sets the microbatch, of which `windows` may need less than the options allow.
void set_batch(Config& config, const EvaluationOptions& options, int64_t windows, int ranks) {
  DistributedConfig& d = config.distributed;
  PolicyConfig& policy = config.policy;
  const int64_t copies = std::max<int64_t>(ranks / d.model_ranks(), 1);
  const int64_t micro = std::min(options.micro_batch, (windows + copies - 1) / copies);
  policy.train_micro_batch_size = micro;
  policy.train_global_batch_size = micro * copies;
  const int64_t tokens = micro * policy.max_total_sequence_length / d.context_parallel_size;
  if (d.sequence_parallel.is_auto() && tokens % d.tensor_parallel_size != 0) d.sequence_parallel = false;
}

/// Keys of the user that have no effect on an evaluation.
Diagnostics refuse_others(const ConfigResult& result, int first_override, bool examples) {
  Diagnostics out;
  for (const auto& [key, origin] : result.origins) {
    if (origin.source < first_override || among(layout_keys, key)) continue;
    const bool of_examples = among(example_keys, key);
    if (of_examples && examples) continue;
    out.push_back(diagnose(
        result, key,
        fmt::format("{} has no effect on an evaluation{}", key, of_examples ? " of token files" : ""), "",
        {"it reads the keys of section distributed that divide the model, section kernels, and with files "
         "of records the keys that make examples of them: see nrl-train eval --help"}));
  }
  const ShardStrategy strategy = result.config.distributed.shard_strategy;
  if (result.sound("distributed.shard_strategy") &&
      (strategy == ShardStrategy::optim || strategy == ShardStrategy::optim_grads))
    out.push_back(diagnose(result, "distributed.shard_strategy",
                           fmt::format("distributed.shard_strategy: {} has no effect on an evaluation, which "
                                       "has neither gradients nor optimizer state",
                                       name_of(strategy)),
                           "", {"Fix: remove it, or use optim_grads_params, which shards the weights"}));
  return out;
}

/// The model as its forward passes see it: without dropout and losses of routers, which only train.
model::ModelSpec without_training(model::ModelSpec spec) {
  spec.residual_dropout = spec.embedding_dropout = spec.attention_dropout = 0;
  spec.moe.aux_loss = 0;
  return spec;
}

/// Names the options that set keys which the user did not write.
void explain_options(Diagnostics& found) {
  constexpr std::pair<std::string_view, std::string_view> options[] = {
      {"max_total_sequence_length", "--sequence-length"}, {"train_micro_batch_size", "--micro-batch"}};
  for (Diagnostic& d : found) {
    std::string text = d.message;
    for (const std::string& note : d.notes) text += note;
    for (const auto& [key, option] : options)
      if (text.find(key) != std::string::npos) d.notes.push_back(fmt::format("{} is {}", key, option));
  }
}

}  // namespace

int64_t windows_of(int64_t tokens, int64_t length) {
  return (tokens - 2) / length + 1;
}

ConfigResult evaluation_config(const EvaluationOptions& options, const model::ModelSpec& spec, int ranks,
                               std::span<const ClusterNode> nodes) {
  const std::optional<Config> saved = saved_config(options.directory);
  const int64_t length = length_of(options, spec, saved);
  std::vector<std::string> settings = own_settings(options, saved, length);
  const auto own = static_cast<int>(settings.size());
  settings.insert(settings.end(), options.overrides.begin(), options.overrides.end());
  ConfigResult result = load_config_text(fmt::format("algorithm: {}\n", algorithm_for(options, settings)),
                                         "nrl-train eval", settings);
  const int first_override = 1 + own;  // after the text
  const Diagnostics refused = refuse_others(result, first_override, options.examples);
  std::erase_if(result.diagnostics, [&](const Diagnostic& d) {
    const auto origin = result.origins.find(d.key);
    const bool user = origin != result.origins.end() && origin->second.source >= first_override;
    // Advice of a run to make a key effective would not help.
    const auto same_key = [&d](const Diagnostic& other) { return other.key == d.key; };
    return (d.severity == Severity::warning && !user) ||
           std::any_of(refused.begin(), refused.end(), same_key);
  });
  result.add(refused);
  if (result.ok()) {
    const int64_t windows =
        options.examples ? INT64_MAX / 2 : windows_of(std::max<int64_t>(options.tokens, 2), length);
    set_batch(result.config, options, windows, ranks);
    result.add(validate_for_world(result, ranks, nodes));
    const model::ModelSpec model = without_training(spec);
    const DeviceChoice device = choose_device(result.config.device);
    result.add(check::check_model({.result = result,
                                   .model = &model,
                                   .gpu = device.type == DeviceType::cuda,
                                   .why_no_gpu = device.why_no_gpu,
                                   .world = ranks}));
  }
  explain_options(result.diagnostics);
  if (!result.ok()) raise(result.diagnostics);
  return result;
}

}  // namespace nrl::train
