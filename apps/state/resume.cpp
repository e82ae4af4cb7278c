#include "apps/state/resume.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string_view>

#include "apps/model/families/hf_config.h"
#include "apps/state/checkpoint.h"
#include "core/base/error.h"
#include "core/base/text.h"
#include "core/config/load.h"
#include "core/config/resume_rule.h"

namespace nrl::train {
namespace {

constexpr int64_t record_version = 1;

/// The rule for a setting or fact of the record that a resumed run changes.
ResumeRule rule_of(std::string_view fact) {
  if (fact.ends_with(']') || fact == "ranks") {  // a list of files has its own rule for what they contain
    if (!fact.starts_with("data.train.content")) return {.change = OnResume::reported};
    return resume_rule("data.train.weights");
  }
  // Rotary frequencies of some layers have the rule of all.
  if (constexpr std::string_view some = "policy.model.rope["; fact.starts_with(some))
    return rule_of(fmt::format("policy.model.{}", fact.substr(fact.find("].") + 2)));
  // Names of facts that families have under several keys.
  if (fact == "policy.model.norm_eps") return resume_rule("policy.model.rms_norm_eps");
  if (fact == "policy.model.rope_type") return resume_rule("policy.model.rope_scaling.rope_type");
  return resume_rule(fact);
}

void add_experts(const model::MoeSpec& moe, RunRecord& record) {
  const auto& [experts, ffn, rule, expert_bias, shared_ffn, shared_gate, dense, aux_loss, z_loss, aux_tokens,
               bias_rate, capacity_factor, row_slack, pad_to_capacity, drop_by_probability, dispatcher] = moe;
  auto add = [&](std::string_view key, const auto& value) {
    record[fmt::format("policy.model.{}", key)] = fmt::format("{}", value);
  };
  add("num_experts", experts);
  add("moe_intermediate_size", ffn);
  add("num_experts_per_tok", rule.top_k);
  add("norm_topk_prob", rule.normalize);
  add("moe_router_score_function", rule.score == ops::RouterScore::sigmoid ? "sigmoid" : "softmax");
  add("moe_router_topk_scaling_factor", rule.scale);
  add("moe_router_num_groups", rule.groups);
  add("moe_router_group_topk", rule.group_top_k);
  add("moe_router_enable_expert_bias", expert_bias);
  add("moe_router_bias_update_rate", bias_rate);
  add("shared_expert_intermediate_size", shared_ffn);
  std::string layers;
  for (size_t i = 0; i < dense.size(); ++i)
    if (dense[i] != 0) layers += fmt::format("{}{}", layers.empty() ? "" : ", ", i);
  add("mlp_only_layers", layers);
  (void)shared_gate;  // follows from the family
  (void)dispatcher;   // changes no number
  (void)row_slack;    // nor does this
  add("moe_aux_loss_coeff", aux_loss);
  add("moe_z_loss_coeff", z_loss);
  (void)aux_tokens;
  add("moe_router_load_balancing_type", moe.aux_name());
  add("moe_expert_capacity_factor", capacity_factor);
  add("moe_pad_expert_input_to_capacity", pad_to_capacity);
  add("moe_token_drop_policy", drop_by_probability ? "probs" : "position");
}

/// The window of all layers, or of each.
std::string windows_text(const std::vector<model::LayerKind>& kinds) {
  std::vector<std::string> windows;
  for (const model::LayerKind& kind : kinds) windows.push_back(std::to_string(kind.window));
  const bool equal = std::ranges::all_of(windows, [&](const std::string& w) { return w == windows.front(); });
  return equal ? windows.front() : joined(windows, " ");
}

// The structured bindings name every member, so that a new member of ModelSpec or RopeSpec breaks the build
// until it is handled here.
template <class Add>
void add_rope(const ops::RopeSpec& rope, int64_t head_dim, const std::string& prefix, const Add& add) {
  const auto& [kind, rotary_dim, theta, factor, low_freq_factor, high_freq_factor, beta_fast, beta_slow,
               attention_factor, truncate, original_max_position] = rope;
  constexpr std::string_view kinds[] = {"default", "linear", "dynamic", "llama3", "yarn"};
  add(prefix + "rope_type", kinds[static_cast<int>(kind)]);
  add(prefix + "rope_theta", theta);
  add(prefix + "partial_rotary_factor", static_cast<double>(rotary_dim) / static_cast<double>(head_dim));
  if (kind != ops::RopeKind::standard)
    add(prefix + "rope_scaling",
        fmt::format("factor {}, low_freq_factor {}, high_freq_factor {}, beta_fast {}, beta_slow {}, "
                    "attention_factor {}, truncate {}, original_max_position_embeddings {}",
                    factor, low_freq_factor, high_freq_factor, beta_fast, beta_slow, attention_factor,
                    truncate, original_max_position));
}

void add_model(const model::ModelSpec& spec, RunRecord& record) {
  auto add = [&](std::string_view key, const auto& value) {
    record[fmt::format("policy.model.{}", key)] = fmt::format("{}", value);
  };
  const auto& [family, vocab_size, hidden, layers, heads, kv_heads, head_dim, ffn, max_positions, norm,
               norm_eps, norm_bias, norm_offset, qk_norm, post_norms, qkv_bias, o_bias, mlp_bias, activation,
               gated, moe, learned_positions, use_rope, ropes, layer_kinds, query_scalar, scaled_embedding,
               head, new_head, tied, initializer_range, residual_dropout, embedding_dropout,
               attention_dropout, trained, unread_keys, config_json] = spec;
  (void)trained;   // recorded as policy.lora and policy.freeze
  (void)new_head;  // follows from policy.model_name
  // These follow from the family.
  (void)norm_offset;
  (void)post_norms;
  (void)scaled_embedding;
  (void)initializer_range;
  (void)unread_keys;
  (void)config_json;
  add("model_type", name_of(family));
  add("vocab_size", vocab_size);
  add("hidden_size", hidden);
  add("num_hidden_layers", layers);
  add("num_attention_heads", heads);
  add("num_key_value_heads", kv_heads);
  add("head_dim", head_dim);
  add("intermediate_size", ffn);
  add("norm", norm == ops::NormKind::rms ? "rms" : "layer");
  add("norm_eps", norm_eps);
  add("norm_bias", norm_bias);
  add("qk_norm", qk_norm);
  add("qkv_bias", qkv_bias);
  add("o_bias", o_bias);
  add("mlp_bias", mlp_bias);
  constexpr std::string_view activations[] = {"none", "silu", "gelu_new", "gelu"};
  add("hidden_act", activations[static_cast<int>(activation)]);
  add("gated", gated);
  add("sliding_window", windows_text(layer_kinds));
  if (query_scalar > 0) add("query_pre_attn_scalar", query_scalar);
  add("head", head == model::HeadKind::scalar ? "scalar" : "vocabulary");
  add("tie_word_embeddings", tied);
  add("resid_pdrop", residual_dropout);
  add("embd_pdrop", embedding_dropout);
  add("attn_pdrop", attention_dropout);
  add("learned_positions", learned_positions ? max_positions : 0);
  if (moe.experts > 0) add_experts(moe, record);
  if (!use_rope) return;
  add_rope(ropes.front(), head_dim, "", add);
  for (size_t i = 1; i < ropes.size(); ++i) add_rope(ropes[i], head_dim, fmt::format("rope[{}].", i), add);
}

void add_sources(std::string_view section, const std::vector<DataSource>& sources, RunRecord& record) {
  for (size_t i = 0; i < sources.size(); ++i) {
    record[fmt::format("{}.data_path[{}]", section, i)] = sources[i].prefix;
    record[fmt::format("{}.content[{}]", section, i)] = sources[i].content;
  }
}

std::string listed(const std::vector<std::string>& lines) {
  constexpr std::string_view line = "\n  ";
  return std::string(line) + joined(lines, line);
}

}  // namespace

CheckpointChoice choose_checkpoint(const CheckpointingConfig& c, const KnownDamage& known) {
  const ResumeMode mode = c.resume.mode;
  if (mode == ResumeMode::never || (mode == ResumeMode::automatic && !c.enabled)) return {};
  if (mode == ResumeMode::directory) {
    const std::string& directory = c.resume.directory;
    if (!is_directory(directory))
      fail(Exit::no_input, "checkpointing.resume: there is no directory '{}'", directory);
    const auto found = known.find(directory);
    const std::vector<std::string> problems =
        found == known.end() ? validate_checkpoint(directory, Validation::quick) : found->second;
    if (!problems.empty())
      fail(Exit::data,
           "cannot resume from the checkpoint {}:{}\nFix: set checkpointing.resume to another checkpoint",
           directory, listed(problems));
    return {directory, {}};
  }
  const ResumePoint point = find_resume(c.checkpoint_dir, Validation::quick, known);
  std::vector<std::string> reasons;
  for (const CheckpointEntry& e : point.rejected) reasons.push_back(joined(e.problems, "; ", 3));
  if (!point.checkpoint && !reasons.empty())
    fail(Exit::data,
         "cannot resume from any of the {} checkpoints in {}:{}\nFix: restore one of them, or start from "
         "initial weights with checkpointing.resume=never, which moves them to {}",
         reasons.size(), c.checkpoint_dir, listed(reasons), join_path(c.checkpoint_dir, "previous-N"));
  CheckpointChoice choice;
  for (const std::string& reason : reasons) choice.warnings.push_back("checkpoint not used: " + reason);
  choice.warnings.insert(choice.warnings.end(), point.warnings.begin(), point.warnings.end());
  if (point.checkpoint) choice.path = point.checkpoint->path;
  return choice;
}

KnownDamage without_agreement(const CheckpointingConfig& c, std::vector<std::string>& warnings) {
  KnownDamage unproven;
  if (c.resume.mode != ResumeMode::automatic || !c.enabled) return unproven;
  bool agreed = false;
  for (const CheckpointEntry& e : list_checkpoints(c.checkpoint_dir, Validation::none)) {
    const OpenedManifest opened = open_manifest(e.path);
    if (!opened.problems.empty()) continue;  // choose_checkpoint() finds the same
    if (opened.manifest.state.get_bool("replicas_agreed", false))
      agreed = true;
    else
      unproven[e.path] = {fmt::format(
          "{}: the attempt before ended with silent data corruption, and the replicas were not compared when "
          "this checkpoint was saved",
          e.path)};
  }
  if (agreed) return unproven;
  if (!unproven.empty())
    warnings.push_back(
        "the attempt before ended with silent data corruption, and no checkpoint says that its replicas "
        "agreed: "
        "the newest one may have wrong bits. Fix: start with checkpointing.resume=never, or compare replicas "
        "(reliability.replica_check_period)");
  return {};
}

std::string set_other_checkpoints_aside(const CheckpointingConfig& c, const std::string& resumed_from,
                                        const RunLock& lock) {
  int64_t newest = -1;
  if (!resumed_from.empty() && same_directory(parent_path(resumed_from), c.checkpoint_dir)) {
    const size_t end = resumed_from.find_last_not_of('/');
    const std::string name = resumed_from.substr(0, end + 1);
    newest = parse_step_directory_name(name.substr(name.rfind('/') + 1)).value_or(-1);
  }
  const std::string aside = set_checkpoints_aside(c.checkpoint_dir, newest, lock);
  if (aside.empty()) return {};
  return fmt::format("checkpoints that do not belong to this run were moved to {}", aside);
}

void verify_model_directory(const std::string& directory, VerifyShare share) {
  if (share.parts == 0 || !path_exists(join_path(directory, manifest_name))) return;
  OpenedManifest opened = open_manifest(directory);
  std::vector<std::string> problems = std::move(opened.problems);
  if (problems.empty())
    problems = CheckpointReader(directory, std::move(opened.manifest)).verify_rest(share.part, share.parts);
  if (problems.empty()) return;
  fail(Exit::data,
       "the checkpoint {} differs from what was saved:{}\nFix: use another checkpoint, or, if it was edited "
       "on purpose, remove its {} to use it as a plain Hugging Face model",
       directory, listed(problems), manifest_name);
}

std::vector<std::string> verify_checkpoint(const std::string& directory) {
  std::vector<std::string> problems = validate_checkpoint(directory, Validation::full);
  if (!problems.empty()) return problems;
  try {
    const CheckpointReader reader(directory);
    (void)read_record(reader, read_position(reader).global_batch);
  } catch (const Error& e) {
    problems.push_back(e.what());
  }
  return problems;
}

RunRecord make_record(const Config& config, const model::ModelSpec& spec, DType weights, int ranks,
                      const Inputs& inputs) {
  RunRecord record;
  for (const std::string& key : recorded_keys(config)) record[key] = value_text(config, key);
  record["data.seed"] = std::to_string(data_seed(config));
  record["policy.precision"] = name_of(weights);
  if (weights != DType::bf16) record["policy.optimizer.main_params_dtype"] = "fp32";  // whatever it says
  record["ranks"] = std::to_string(ranks);
  add_sources("data.train", inputs.train, record);
  add_sources("data.validation", inputs.validation, record);
  add_model(spec, record);
  // Checkpoints of adapters need the same base model again.
  std::string base;
  for (const auto& [path, identity] : inputs.files)
    if (spec.trained.adapters && path.ends_with(".safetensors"))
      base += fmt::format("{}{}: {}", base.empty() ? "" : "; ", path.substr(path.rfind('/') + 1), identity);
  if (!base.empty()) record["policy.model_name.content"] = base;
  return record;
}

JsonValue record_to_json(const RunRecord& record) {
  JsonObject facts;
  for (const auto& [key, value] : record) facts.set(key, value);
  return JsonValue::object({{"version", record_version}, {"facts", std::move(facts)}});
}

SavedRecord read_record(const CheckpointReader& reader, int64_t global_batch) {
  SavedRecord saved;
  if (const JsonValue* run = reader.manifest().state.find("run")) {
    if (run->get_int("version") == record_version) {
      for (const auto& [key, value] : run->at("facts").members()) saved.record[key] = value.as_string();
      return saved;
    }
    saved.incomplete = "its run record has another version";
  } else {
    saved.incomplete = "it has no run record";
  }
  saved.incomplete = fmt::format("{}: {}; data, seed, sequence length and settings were not compared",
                                 reader.path(), saved.incomplete);
  saved.record["policy.train_global_batch_size"] = std::to_string(global_batch);
  add_model(
      model::parse_model_config(reader.read_text("config.json"), join_path(reader.path(), "config.json")),
      saved.record);
  return saved;
}

std::vector<std::string> compare_records(const RunRecord& saved, const RunRecord& now,
                                         std::span<const ResumeChange> allowed,
                                         const std::string& checkpoint) {
  std::set<std::string> keys;
  for (const RunRecord* record : {&saved, &now})
    for (const auto& [key, value] : *record) keys.insert(key);
  const auto find = [](const RunRecord& record, const std::string& key) -> std::optional<std::string> {
    const auto it = record.find(key);
    return it == record.end() ? std::nullopt : std::optional(it->second);
  };
  const bool has_data = saved.contains("data.train.content[0]");
  std::vector<std::string> changed, refused;
  std::set<ResumeChange> wanted;
  bool fixed = false;
  for (const std::string& key : keys) {
    const auto before = find(saved, key), after = find(now, key);
    if (before == after) continue;
    // Items of lists may be added or removed. Other keys that only one record has come from another version
    // of the program and cannot be compared.
    const bool item = key.ends_with(']');
    if ((!before || !after) && !(item && has_data) && key != "policy.model.rope_scaling") continue;
    std::string line = fmt::format("{}: {} -> {}", key, before.value_or("none"), after.value_or("none"));
    const ResumeRule rule = rule_of(key);
    const bool structural = rule.change == OnResume::refused, guarded = rule.change == OnResume::needs_word;
    if (structural || (guarded && std::find(allowed.begin(), allowed.end(), rule.word) == allowed.end())) {
      if (guarded) wanted.insert(rule.word);
      fixed = fixed || structural;
      refused.push_back(std::move(line));
    } else {
      const size_t path = key.find(".data_path[");
      const std::string content =
          path == key.npos ? "" : key.substr(0, path) + ".content" + key.substr(path + 10);
      const bool same_content = saved.contains(content) && find(saved, content) == find(now, content);
      const std::string_view consequence = same_content ? "same content" : rule.consequence;
      if (!consequence.empty()) line += fmt::format(" ({})", consequence);
      changed.push_back(std::move(line));
    }
  }
  if (refused.empty()) return changed;
  std::string fix =
      "restore these values; or, to train another model from these weights, set policy.model_name to the "
      "checkpoint";
  if (!fixed) {
    std::string names;
    for (const ResumeChange all : allowed) wanted.insert(all);
    for (const ResumeChange change : wanted) names.append(names.empty() ? "" : ", ").append(name_of(change));
    fix =
        fmt::format("restore these values; or allow the change with checkpointing.allow_changes=[{}]", names);
  }
  fail(Exit::config,
       "cannot resume from the checkpoint {}: it was saved with other values:{}\nFix: {}; or start from "
       "initial weights with checkpointing.resume=never",
       checkpoint, listed(refused), fix);
}

}  // namespace nrl::train
