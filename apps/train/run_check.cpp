#include "apps/train/run_check.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "apps/data/manifest.h"
#include "apps/plan/fp8_check.h"
#include "apps/plan/memory_check.h"
#include "apps/plan/pipeline.h"
#include "apps/train/context_check.h"
#include "apps/train/device_choice.h"
#include "apps/train/document_rules.h"
#include "apps/train/effect_check.h"
#include "apps/train/memory_fit.h"
#include "apps/train/model_source.h"
#include "core/base/text.h"
#include "core/device/cpu/file_memory.h"
#include "core/device/cpu/memory.h"
#include "core/io/atomic_file.h"

namespace nrl::train {
namespace {

Diagnostic missing(const ConfigResult& result, std::string_view key, std::string message,
                   std::vector<std::string> notes) {
  Diagnostic d = diagnose(result, key, std::move(message), "", std::move(notes));
  d.exit = Exit::no_input;
  return d;
}

// Reports missing token files.
void check_data(const ConfigResult& result, const DatasetConfig& set, const std::string& key,
                Diagnostics& out) {
  if (!result.sound(key)) return;
  for (const std::string& prefix : set.data_path) {
    std::string absent;
    for (const char* suffix : {".idx", ".bin"})
      if (!path_exists(prefix + suffix)) absent += (absent.empty() ? "" : " and ") + clipped(prefix) + suffix;
    if (prefix.empty() || absent.empty()) continue;
    std::vector<std::string> notes;
    const bool suffixed = prefix.ends_with(".bin") || prefix.ends_with(".idx");
    if (suffixed && path_exists(prefix))
      notes.push_back(
          fmt::format("give the prefix without the suffix: {}", prefix.substr(0, prefix.size() - 4)));
    else if (path_exists(prefix))
      notes.push_back(fmt::format(
          "'{0}' is not a token file; if it is text, make token files with nrl-train prepare --input "
          "{0} --tokenizer ... --output PREFIX",
          clipped(prefix)));
    else
      notes.push_back(
          fmt::format("expected a prefix of token files, relative to the working directory; make them with "
                      "nrl-train prepare --input TEXT --tokenizer ... --output {}",
                      clipped(prefix)));
    out.push_back(missing(result, key,
                          fmt::format("{}: {} missing", key,
                                      absent + (absent.find(" and ") == std::string::npos ? " is" : " are")),
                          std::move(notes)));
  }
}

// Warns if the data were made with another tokenizer than the one that goes into checkpoints.
void check_tokenizer(const ConfigResult& result, const DatasetConfig& set, const std::string& key,
                     Diagnostics& out) {
  const PolicyConfig& p = result.config.policy;
  const auto& tokenizer = p.tokenizer.name ? p.tokenizer.name : p.model_name;
  const char* const tokenizer_key = p.tokenizer.name ? "policy.tokenizer.name" : "policy.model_name";
  if (!tokenizer || !result.sound(key) || !result.sound(tokenizer_key)) return;
  for (const std::string& prefix : set.data_path) {
    std::string text;
    try {
      text = data::other_tokenizer_warning(prefix, *tokenizer);
    } catch (const Error&) {
      continue;  // a manifest that cannot be read is an error of check_against_model()
    }
    if (text.empty()) continue;
    out.push_back(diagnose(
        result, key, text, "",
        {fmt::format("{} is {}; prepare the data with its tokenizer", tokenizer_key, clipped(*tokenizer))},
        Severity::warning));
  }
}

// Makes a file where a CPU run keeps offloaded memory, and drops it.
void check_offload_directory(const ConfigResult& result, Diagnostics& found) {
  constexpr std::string_view key = "memory.offload_dir";
  const Config& c = result.config;
  if (!c.memory.offload_dir || !result.sound(key) || choose_device(c.device).type != DeviceType::cpu) return;
  try {
    const cpu::FileMemory smallest(cpu::scratch_directory(*c.memory.offload_dir), 1);
  } catch (const Error& e) {
    found.push_back(diagnose(result, key, e.what()));
    found.back().exit = e.code();
  }
}

void check_files(const ConfigResult& result, Diagnostics& found) {
  const Config& c = result.config;
  check_data(result, c.data.train, "data.train.data_path", found);
  check_data(result, c.data.validation, "data.validation.data_path", found);
  check_tokenizer(result, c.data.train, "data.train.data_path", found);
  check_tokenizer(result, c.data.validation, "data.validation.data_path", found);
  const auto& [resume, directory] = c.checkpointing.resume;
  if (resume == ResumeMode::directory && result.sound("checkpointing.resume") && !is_directory(directory))
    found.push_back(
        missing(result, "checkpointing.resume",
                fmt::format("checkpointing.resume: there is no directory '{}'", clipped(directory)),
                {"give a checkpoint directory (.../step-N), auto or never"}));
  check_offload_directory(result, found);
}

// What tensor-parallel ranks divide evenly.
void check_tensor_parallel(const ConfigResult& result, const model::ModelSpec& spec, Diagnostics& out) {
  constexpr std::string_view key = "distributed.tensor_parallel_size";
  const int64_t ranks = result.config.distributed.tensor_parallel_size;
  if (!result.sound(key)) return;
  std::string reasons;
  int64_t common = 0;
  const bool dense = spec.expert_layers() < spec.layers;
  for (const auto& [what, size] :
       {std::pair("attention heads", spec.heads), std::pair("key/value heads", spec.kv_heads),
        std::pair("columns of the MLP", dense ? spec.ffn : 0),
        std::pair("columns of the shared expert", spec.moe.shared_ffn)}) {
    common = std::gcd(common, size);
    if (size % ranks != 0) reasons += fmt::format("{}{} {}", reasons.empty() ? "" : ", ", size, what);
  }
  if (ranks > spec.vocab_size)
    reasons += fmt::format("{}{} tokens", reasons.empty() ? "" : ", ", spec.vocab_size);
  if (reasons.empty()) return;
  std::string fitting;
  for (int64_t n = 1; n <= std::min(common, spec.vocab_size); ++n)
    if (common % n == 0) fitting += fmt::format("{}{}", fitting.empty() ? "" : ", ", n);
  out.push_back(diagnose(
      result, key, fmt::format("{} is {}, which does not divide the model: it has {}", key, ranks, reasons),
      "", {fmt::format("fits: {}", fitting)}));
}

// The data and the sequence length against the model.
void check_against_model(const ConfigResult& result, const model::ModelSpec& spec, Diagnostics& out) {
  const Config& c = result.config;
  constexpr std::string_view length_key = "policy.max_total_sequence_length";
  if (spec.learned_positions && c.policy.max_total_sequence_length > spec.max_positions &&
      result.sound(length_key))
    out.push_back(diagnose(result, length_key,
                           fmt::format("{} is {}, but the model has {} positions", length_key,
                                       c.policy.max_total_sequence_length, spec.max_positions)));
  check_tensor_parallel(result, spec, out);
  const std::pair<const DatasetConfig*, const char*> sets[] = {
      {&c.data.train, "data.train.data_path"}, {&c.data.validation, "data.validation.data_path"}};
  for (const auto& [set, key] : sets) {
    if (!result.sound(key)) continue;
    for (const std::string& prefix : set->data_path) {
      try {
        const auto manifest = data::read_manifest(prefix);
        if (!manifest || manifest->vocab_size <= spec.vocab_size) continue;
        const bool ours = result.origins.contains("policy.model.vocab_size");
        out.push_back(diagnose(
            result, ours ? "policy.model.vocab_size" : key,
            fmt::format("the vocabulary of the data has {} tokens, but that of the model only {}",
                        manifest->vocab_size, spec.vocab_size),
            fmt::format("{} was made with {} tokens", clipped(prefix), manifest->vocab_size),
            {fmt::format(
                "set policy.model.vocab_size to {} or more, or prepare the data with the model's tokenizer",
                manifest->vocab_size)}));
      } catch (const Error& e) {
        Diagnostic d = diagnose(result, key, e.what());
        d.exit = e.code();
        out.push_back(std::move(d));
      }
    }
  }
}

// What the ranks that divide the experts divide evenly, and how tokens get to them.
void check_expert_ranks(const ConfigResult& result, const model::ModelSpec& spec, Diagnostics& out) {
  const Config& c = result.config;
  constexpr std::string_view experts = "distributed.expert_parallel_size",
                             parts = "distributed.expert_tensor_parallel_size",
                             dispatcher = "policy.model.moe_token_dispatcher_type",
                             graph = "policy.cuda_graph";
  const int64_t ep = c.distributed.expert_parallel_size, etp = c.distributed.expert_tensor_parallel_size;
  const auto divides = [&](std::string_view key, int64_t ranks, int64_t size, const char* what) {
    if (size % ranks != 0 && result.sound(key))
      out.push_back(diagnose(
          result, key,
          fmt::format("{} is {}, which does not divide the {} {} of the model", key, ranks, size, what)));
  };
  divides(experts, ep, spec.moe.experts, "experts");
  divides(parts, etp, spec.moe.ffn, "columns of an expert");
  if (spec.moe.dispatcher == model::TokenDispatcher::alltoall)
    divides(parts, etp, spec.hidden, "columns of the residual stream");
  if (ep * etp == 1) return;
  const std::string ranks = fmt::format("experts are divided over {} ranks", ep * etp);
  const bool gathers = spec.moe.dispatcher == model::TokenDispatcher::allgather;
  if (gathers && spec.moe.capacity_factor > 0 && result.sound(dispatcher))
    out.push_back(
        diagnose(result, dispatcher,
                 fmt::format("{}: allgather does not drop tokens, but moe_expert_capacity_factor is {}",
                             dispatcher, spec.moe.capacity_factor),
                 ranks, {"remove moe_expert_capacity_factor, or use alltoall"}));
  constexpr std::string_view slack = "policy.model.moe_row_slack", schedule = "distributed.pipeline_schedule";
  if (!gathers && c.distributed.pipeline_schedule == ScheduleKind::zb_h1 && spec.moe.row_slack > 0 &&
      result.origins.contains(std::string(slack)) && result.sound(slack))
    out.push_back(diagnose(
        result, slack,
        fmt::format("{} is {}, but {} is zb_h1, which computes weight gradients later: of rows that are "
                    "exchanged in rounds nothing is kept until then",
                    slack, spec.moe.row_slack, schedule),
        ranks,
        {fmt::format("set {} to 0 (memory for all rows that can come), or {} to 1f1b", slack, schedule)}));
  if (!gathers && c.policy.cuda_graph && result.sound(graph))
    out.push_back(diagnose(
        result, graph,
        fmt::format("{}: true cannot capture a step in which the host waits for the numbers of tokens of "
                    "experts ({}: alltoall)",
                    graph, dispatcher),
        ranks, {fmt::format("set {} to allgather, or {} to false", dispatcher, graph)}));
}

// What names layers or parts of them that the model has not.
void check_recompute(const ConfigResult& result, const model::ModelSpec& spec, Diagnostics& out) {
  const PolicyConfig& p = result.config.policy;
  const auto add = [&](std::string_view key, std::string message) {
    if (result.sound(key)) out.push_back(diagnose(result, key, std::move(message)));
  };
  const auto has = [&](BlockModule m) {
    const auto& modules = p.recompute.modules;
    return !modules.is_auto() &&
           std::find(modules.value().begin(), modules.value().end(), m) != modules.value().end();
  };
  constexpr std::string_view modules = "policy.recompute.modules";
  if (spec.moe.experts == 0 && has(BlockModule::moe))
    add(modules,
        fmt::format("{}: moe matches nothing: a {} model has no experts", modules, name_of(spec.family)));
  if (spec.expert_layers() == spec.layers && has(BlockModule::mlp))
    add(modules, fmt::format("{}: mlp matches nothing: all layers of the model have experts", modules));
  for (const int64_t layer : p.checkpoint_layers.value_or(std::vector<int64_t>{}))
    if (layer >= spec.layers)
      add("policy.checkpoint_layers",
          fmt::format("policy.checkpoint_layers has layer {}, but the model has {} layers: 0 to {}", layer,
                      spec.layers, spec.layers - 1));
  if (p.checkpoint_layers && static_cast<int64_t>(p.checkpoint_layers->size()) == spec.layers)
    for (const auto& [key, set] :
         {std::pair(modules, !p.recompute.modules.is_auto()),
          {"policy.recompute.granularity", p.recompute.granularity != RecomputeGranularity::automatic}})
      if (set)
        add(key,
            fmt::format("{} has no effect: policy.checkpoint_layers names all {} layers", key, spec.layers));
  constexpr std::string_view offloaded = "policy.offload_modules";
  const auto offloads = [&](BlockModule m) {
    return std::find(p.offload_modules.begin(), p.offload_modules.end(), m) != p.offload_modules.end();
  };
  if (spec.moe.experts == 0 && offloads(BlockModule::moe))
    add(offloaded,
        fmt::format("{}: moe matches nothing: a {} model has no experts", offloaded, name_of(spec.family)));
  if (spec.expert_layers() == spec.layers && offloads(BlockModule::mlp))
    add(offloaded, fmt::format("{}: mlp matches nothing: all layers of the model have experts", offloaded));
  for (const int64_t layer : p.offload_layers.value_or(std::vector<int64_t>{}))
    if (layer >= spec.layers)
      add("policy.offload_layers",
          fmt::format("policy.offload_layers has layer {}, but the model has {} layers: 0 to {}", layer,
                      spec.layers, spec.layers - 1));
  for (const auto& [key, count] : {std::pair("policy.checkpoint_every", p.checkpoint_every),
                                   {"policy.recompute.num_layers", p.recompute.num_layers}})
    if (count && *count > spec.layers)
      add(key, fmt::format("{} is {}, but the model has {} layers", key, *count, spec.layers));
}

// FP8 operands: the sizes of the matrices of a rank, and of a microbatch.
void check_fp8(const ConfigResult& result, const model::ModelSpec& spec, int world, Diagnostics& out) {
  const Config& c = result.config;
  const Fp8Config& fp8 = c.policy.fp8_cfg;
  constexpr std::string_view enabled = "policy.fp8_cfg.enabled", recipe_key = "policy.fp8_cfg.fp8_recipe";
  if (!fp8.enabled || !result.sound(enabled) || !result.sound(recipe_key) ||
      !result.sound("distributed.tensor_parallel_size"))
    return;
  const auto add = [&](std::string_view key, std::string text, std::vector<std::string> notes) {
    out.push_back(diagnose(result, key, std::move(text), "", std::move(notes)));
  };
  if (fp8.num_first_layers_in_bf16 + fp8.num_last_layers_in_bf16 >= spec.layers)
    return add(enabled,
               fmt::format("no layer reads FP8: {} first and {} last of {} layers are excluded",
                           fp8.num_first_layers_in_bf16, fp8.num_last_layers_in_bf16, spec.layers),
               {"lower policy.fp8_cfg.num_first_layers_in_bf16 or num_last_layers_in_bf16, or set " +
                std::string(enabled) + " to false"});
  const bool experts = spec.expert_layers() > 0;
  if (result.sound("device") && choose_device(c.device).type == DeviceType::cuda)
    if (Diagnostics found = plan::check_fp8_on_gpus(result, spec); !found.empty()) {
      out.insert(out.end(), found.begin(), found.end());
      return;
    }
  if (constexpr std::string_view param = "policy.fp8_cfg.fp8_param";
      experts && fp8.fp8_param && result.sound(param))
    return add(param,
               fmt::format("{}: true does not support models with experts, and {} has some", param,
                           name_of(spec.family)),
               {"set it to false"});
  const precision::Recipe recipe = plan::recipe_for(c, DeviceType::cpu, spec.layers);
  const Scaling scaling = recipe.quantized().input.scaling;
  const int64_t unit = precision::dimension_unit(scaling), ranks = c.distributed.tensor_parallel_size;
  const auto divides = [&](std::string_view key, std::string_view what, int64_t size, int64_t parts,
                           std::string_view of_ranks, int64_t multiple) {
    if (size / parts % multiple == 0) return;
    const std::string split = parts > 1 ? fmt::format(" on each of {} {} ranks", parts, of_ranks) : "";
    add(key,
        fmt::format("{}: {} {}{} are not a multiple of {}, which FP8 with {} scales needs", key, size / parts,
                    what, split, multiple, name_of(fp8.fp8_recipe)),
        {fmt::format("use a model of other sizes, another {}, or {}: false", recipe_key, enabled)});
  };
  constexpr std::string_view tensor = "tensor-parallel";
  // The matrices of experts lie below each other, and no block of scales has parts of two.
  const int64_t of_experts = row_unit(scaling);
  divides("policy.model.hidden_size", "columns of the residual stream", spec.hidden, 1, tensor,
          experts ? of_experts : unit);
  divides("policy.model.num_attention_heads", "columns of the queries", spec.q_width(), ranks, tensor, unit);
  divides("policy.model.num_key_value_heads", "columns of queries, keys and values", spec.qkv_width(), ranks,
          tensor, unit);
  if (fp8.fp8_dot_product_attention) {
    constexpr std::string_view attention = "policy.fp8_cfg.fp8_dot_product_attention";
    divides("policy.model.num_key_value_heads", "columns of the keys", spec.kv_width(), ranks, tensor, unit);
    if (spec.attention_dropout > 0)
      add(attention,
          fmt::format("{}: true is not supported with dropout of probabilities, which is {}", attention,
                      spec.attention_dropout),
          {"set policy.model.attention_dropout (attn_pdrop) to 0, or it to false"});
  }
  if (spec.expert_layers() < spec.layers)
    divides("policy.model.intermediate_size", "columns of the MLP", spec.ffn, ranks, tensor, unit);
  if (experts && result.sound("distributed.expert_tensor_parallel_size"))
    divides(spec.family == model::Family::mixtral ? "policy.model.intermediate_size"
                                                  : "policy.model.moe_intermediate_size",
            "columns of an expert", spec.moe.ffn, c.distributed.expert_tensor_parallel_size,
            "expert-tensor-parallel", of_experts);
  if (spec.moe.shared_ffn > 0)
    divides("policy.model.shared_expert_intermediate_size", "columns of the shared expert",
            spec.moe.shared_ffn, ranks, tensor, unit);
  constexpr std::string_view length_key = "policy.max_total_sequence_length";
  if (!result.sound(length_key) || !result.sound("distributed.context_parallel_size")) return;
  // A microbatch of auto is known with the ranks, which must suit the rest of the configuration.
  const bool chosen = c.policy.train_micro_batch_size.is_auto();
  if (chosen && (world == 0 || !result.ok())) return;
  const int64_t rows = row_unit(scaling),
                length = c.policy.max_total_sequence_length / c.distributed.context_parallel_size,
                micro = chosen ? resolve_batch(c, world).micro : c.policy.train_micro_batch_size.value();
  if (length * micro % rows != 0)
    add(length_key,
        fmt::format("{}: a microbatch of {} x {} tokens is not a multiple of {}, which FP8 with {} scales "
                    "needs",
                    length_key, micro, length, rows, name_of(fp8.fp8_recipe)),
        {fmt::format("fits: a multiple of {} for each rank", rows / std::gcd(rows, micro)),
         fmt::format("or microbatches of a multiple of {} sequences", rows / std::gcd(rows, length))});
}

// Every rank routes tokens of its own.
void check_experts(const ConfigResult& result, const model::ModelSpec& spec, Diagnostics& out) {
  if (spec.moe.experts == 0) {
    for (const auto& [key, size] :
         {std::pair("distributed.expert_parallel_size", result.config.distributed.expert_parallel_size),
          std::pair("distributed.expert_tensor_parallel_size",
                    result.config.distributed.expert_tensor_parallel_size)})
      if (size > 1 && result.sound(key))
        out.push_back(
            diagnose(result, key,
                     fmt::format("{} is {}, but a {} model has no experts", key, size, name_of(spec.family)),
                     "", {"remove it"}));
    return;
  }
  const DistributedConfig& d = result.config.distributed;
  constexpr std::string_view tensor = "distributed.tensor_parallel_size",
                             context = "distributed.context_parallel_size",
                             sequence = "distributed.sequence_parallel";
  if (d.tensor_parallel_size > 1 && !d.splits_sequence() && result.sound(tensor) && result.sound(sequence))
    out.push_back(diagnose(
        result, sequence,
        fmt::format(
            "{}: false leaves all tokens on every tensor-parallel rank, but the experts of a {} model "
            "need ranks with tokens of their own",
            sequence, name_of(spec.family)),
        "", {fmt::format("set {} to true or auto, or {} to 1", sequence, tensor)}));
  for (const auto& [key, size] :
       {std::pair(tensor, d.tensor_parallel_size), std::pair(context, d.context_parallel_size)})
    if (size > 1 && spec.moe.capacity_factor > 0 && result.sound(key))
      out.push_back(diagnose(
          result, key,
          fmt::format(
              "{} is {}, but policy.model.moe_expert_capacity_factor drops tokens of a microbatch, of "
              "which every rank knows its own only",
              key, size),
          "", {fmt::format("remove moe_expert_capacity_factor, or set {} to 1", key)}));
  check_expert_ranks(result, spec, out);
}

// Checks the end-of-document token if documents are separated.
void check_documents(const ConfigResult& result, Diagnostics& out) {
  const DataConfig& c = result.config.data;
  const char* key = c.reset_attention_mask ? "data.reset_attention_mask"
                    : c.reset_position_ids ? "data.reset_position_ids"
                                           : "data.eod_mask_loss";
  for (const char* needed : {"data.train.data_path", "data.validation.data_path", "policy.tokenizer.name"})
    if (!result.sound(needed)) return;
  try {
    document_rules(result.config);
  } catch (const Error& e) {
    Diagnostic d = diagnose(result, key, e.what());
    d.exit = e.code();
    out.push_back(std::move(d));
  }
}

// bf16 logits on a CPU, for which no memory can be planned. The ranks check what depends on their devices
// later (placement.cpp), in the same words.
void check_logits(const ConfigResult& result, Diagnostics& out) {
  if (result.config.policy.logits_dtype != LogitsDType::bfloat16 ||
      result.config.device != DeviceKind::automatic)
    return;
  const DeviceChoice device = choose_device(result.config.device);
  for (Diagnostic& d :
       validate_for_device(result, {.gpu = device.type == DeviceType::cuda, .why = device.why_no_gpu}))
    if (d.key == "policy.logits_dtype") out.push_back(std::move(d));
}

// What memory.on_oom: reduce_batch may do without changing the training.
void check_on_oom(const ConfigResult& result, const model::ModelSpec& spec, Diagnostics& out) {
  constexpr std::string_view key = "memory.on_oom";
  if (result.config.memory.on_oom != OnOom::reduce_batch || !result.sound(key)) return;
  if (const std::string why = microbatch_dependence(spec); !why.empty())
    out.push_back(diagnose(
        result, key, fmt::format("memory.on_oom: reduce_batch would change the training, because {}", why),
        "",
        {"use fail and choose train_micro_batch_size, or policy.model.moe_router_load_balancing_type: "
         "seq_aux_loss without a capacity"}));
}

// Takes smaller microbatches until the run needs at most `limit`. False if none does. `chosen`: by auto.
bool reduce_batch(ConfigResult& result, const model::ModelSpec& spec, const RunSetting& setting,
                  DeviceType device, int threads, double limit, bool chosen) {
  const BatchPlan before = resolve_batch(result.config, setting.world);
  const auto need_of = [&](const Config& config, const BatchPlan& batch) {
    return needed_memory(config, spec, batch, setting.world, device, threads, limit,
                         memory_for_rank(config.kernels, device, setting.gpu_memory, setting.local));
  };
  for (auto batch = smaller_microbatch(before); batch; batch = smaller_microbatch(*batch)) {
    Config smaller = result.config;
    set_microbatch(smaller, *batch);
    const double need = need_of(smaller, *batch);
    if (need > limit) continue;
    std::vector<std::string> notes{fmt::format(
        "a rank needs {} instead of {} or more; the limit is {}{}", human_bytes(static_cast<uint64_t>(need)),
        human_bytes(static_cast<uint64_t>(need_of(result.config, before))),
        human_bytes(static_cast<uint64_t>(limit)), chosen ? " (memory.max_memory)" : "")};
    if (const std::string why = microbatch_dependence(spec); !why.empty())
      notes.push_back(fmt::format("this changes the training, because {}: give a number to fix it", why));
    result.add(
        {diagnose(result, chosen ? "policy.train_micro_batch_size" : "memory.on_oom",
                  microbatch_change(before, *batch, chosen), "", std::move(notes), Severity::warning)});
    result.config = std::move(smaller);
    return true;
  }
  return false;
}

}  // namespace

void fit_memory(ConfigResult& result, const model::ModelSpec& spec, const RunSetting& setting) {
  if (setting.memory) check_memory_limit(result);
  if (!result.ok()) return;
  const Config& c = result.config;
  const BatchPlan batch = resolve_batch(c, setting.world);
  const DeviceType device = choose_device(c.device).type;
  const int threads = threads_for(c.kernels, setting.local);
  const bool on_cpu = device == DeviceType::cpu, known = setting.memory && (on_cpu || setting.gpu_memory > 0);
  // 1 PiB is more than any machine has.
  const double capacity = !known   ? static_cast<double>(int64_t{1} << 50)
                          : on_cpu ? static_cast<double>(cpu::machine_memory()) / setting.local
                                   : static_cast<double>(setting.gpu_memory);
  const std::string owner = !known    ? "any machine"
                            : !on_cpu ? "the GPU"
                            : setting.local == 1
                                ? "this machine"
                                : fmt::format("this machine (shared by {} ranks)", setting.local);
  const size_t memory = memory_for_rank(c.kernels, device, setting.gpu_memory, setting.local);
  const double budget = c.memory.max_memory * capacity;
  const auto valid = [&](ConfigResult& changed) {
    RunSetting other = setting;
    other.files = other.memory = false;
    check_run(changed, other);
    return changed.ok();
  };
  if (known && chooses_microbatch(c) &&
      needed_memory(c, spec, batch, setting.world, device, threads, budget, memory) > budget) {
    if (reduce_batch(result, spec, setting, device, threads, budget, true)) return;
    ConfigResult least = result;
    const BatchPlan smallest = least_microbatch(batch);
    set_microbatch(least.config, smallest);
    plan::CategoryBytes need = plan::minimum_memory(c, spec, smallest, device);
    if (plan::total(need) <= budget)
      need = largest_need(least.config, spec, smallest, setting.world, device, threads, memory);
    if (auto shortage = plan::share_shortage(result, spec, smallest, need, capacity, owner)) {
      plan::add_changes(*shortage, fitting_notes(changes_that_fit(least, setting.world, valid, device,
                                                                  threads, budget, memory)));
      result.add({std::move(*shortage)});
    }
    return;
  }
  const plan::CategoryBytes least = plan::minimum_memory(c, spec, batch, device);
  auto shortage = plan::memory_shortage(result, spec, batch, least, capacity, owner);
  // A run that is a little too large is planned too, to show what it needs exactly.
  constexpr double least_share = 1.0 / 16;
  const bool little = shortage && batch.accumulation <= 1024 && plan::total(least) < capacity / least_share;
  if (known && (!shortage || little)) {
    const plan::CategoryBytes need = largest_need(c, spec, batch, setting.world, device, threads, memory);
    shortage = plan::memory_shortage(result, spec, batch, need, capacity, owner);
  }
  if (!shortage) return;
  if (known && c.memory.on_oom == OnOom::reduce_batch &&
      reduce_batch(result, spec, setting, device, threads, capacity, false))
    return;
  if (known)
    plan::add_changes(*shortage, fitting_notes(changes_that_fit(result, setting.world, valid, device, threads,
                                                                capacity, memory)));
  result.add({std::move(*shortage)});
}

void check_run(ConfigResult& result, const RunSetting& setting) {
  if (setting.grid && setting.world > 0)
    result.add(validate_for_world(result, setting.world, setting.nodes, setting.count));
  const ModelCheck model = check_model(result);
  result.add(model.problems);
  Diagnostics found;
  if (setting.files) check_files(result, found);
  if (setting.world > 0) check_threads_variable(result, found);
  if (setting.training) check_profiler_variables(found);
  check_documents(result, found);
  result.add(found);
  if (!model.spec) return;
  found.clear();
  check_against_model(result, *model.spec, found);
  check_context_parallel(result, *model.spec, found);
  for (Diagnostic& d : plan::check_pipeline(result, model.spec->layers)) found.push_back(std::move(d));
  check_experts(result, *model.spec, found);
  check_expert_keys(result, *model.spec, found);
  check_recompute(result, *model.spec, found);
  check_logits(result, found);
  check_on_oom(result, *model.spec, found);
  check_fp8(result, *model.spec, setting.grid ? setting.world : 0, found);
  result.add(found);
  if (!result.ok() || setting.world == 0 || !setting.grid) return;
  found.clear();
  check_offloaded_share(result, *model.spec, setting.world, found);
  result.add(found);
  if (result.ok()) fit_memory(result, *model.spec, setting);
}

}  // namespace nrl::train
