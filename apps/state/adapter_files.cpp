#include "apps/state/adapter_files.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <set>

#include "apps/model/spec/parameters.h"
#include "core/base/error.h"
#include "core/base/text.h"
#include "core/io/atomic_file.h"
#include "core/io/json.h"
#include "core/io/safetensors.h"

namespace nrl::train {
namespace {

using model::adapter_prefix;

constexpr uint64_t max_adapter_config_bytes = uint64_t{4} << 20;
constexpr int64_t max_rank = 1 << 20;
constexpr std::string_view suffix_a = ".lora_A.weight", suffix_b = ".lora_B.weight";

/// Members of PEFT's configuration that change what an adapter computes, and that are not supported unless
/// they are absent, null, false, empty or zero.
constexpr std::array unsupported_keys{
    "use_dora",          "rank_pattern",      "alpha_pattern",           "layers_to_transform",
    "lora_bias",         "target_parameters", "trainable_token_indices", "use_qalora",
    "layer_replication", "megatron_config"};

bool asks_for_nothing(const JsonValue& v) {
  if (v.is_bool()) return !v.as_bool();
  if (v.is_array()) return v.items().empty();
  if (v.is_object()) return v.members().size() == 0;
  return v.is_null();
}

/// True if modules_to_save lists the head of a reward model, as PEFT does for task_type SEQ_CLS. Fails if it
/// lists other modules.
bool saves_score(const JsonValue& json) {
  const JsonValue* modules = json.find("modules_to_save");
  if (!modules || asks_for_nothing(*modules)) return false;
  bool score = false, others = !modules->is_array();
  if (!others)
    for (const JsonValue& module : modules->items()) {
      const std::string name = module.is_string() ? module.as_string() : "";
      score = score || name == "score";
      others = others || (name != "score" && name != "classifier");
    }
  if (others || !score)
    fail(Exit::data, "{}modules_to_save: is {}; expected null or [\"score\"], the head of a reward model",
         modules->where(), clipped(modules->dump(), 60));
  return true;
}

/// The tensors of adapters in a model, with their shapes.
std::map<std::string, std::vector<int64_t>> adapter_tensors(const model::ModelSpec& spec) {
  std::map<std::string, std::vector<int64_t>> out;
  for (const model::Parameter& p : model::make_parameters(spec).all)
    if (p.adapter)
      for (const model::Part& part : p.parts) out[part.name] = part.global;
  return out;
}

std::set<std::string> modules_in(const std::map<std::string, std::vector<int64_t>>& tensors) {
  std::set<std::string> out;
  for (const auto& [name, shape] : tensors)
    if (name.ends_with(suffix_a))
      out.insert(name.substr(adapter_prefix.size(), name.size() - adapter_prefix.size() - suffix_a.size()));
  return out;
}

std::string leaf_of(const std::string& module) {
  return module.substr(module.rfind('.') + 1);
}

/// Patterns that select exactly these of the modules that can have adapters: their last components if these
/// do, else all names.
std::vector<std::string> target_modules(const model::ModelSpec& spec) {
  const std::set<std::string> own = modules_in(adapter_tensors(spec));
  model::ModelSpec all = spec;
  all.trained.adapters.targets = {std::string(model::all_linear)};
  all.trained.adapters.excludes.clear();
  std::set<std::string> leaves;
  for (const std::string& module : own) leaves.insert(leaf_of(module));
  for (const std::string& module : modules_in(adapter_tensors(all)))
    if (leaves.contains(leaf_of(module)) && !own.contains(module)) return {own.begin(), own.end()};
  return {leaves.begin(), leaves.end()};
}

}  // namespace

bool is_adapter(const std::string& directory) {
  return path_exists(join_path(directory, adapter_config_name)) &&
         !path_exists(join_path(directory, "config.json"));
}

StoredAdapter read_adapter(const std::string& directory) {
  const std::string path = join_path(directory, adapter_config_name);
  if (!path_exists(path))
    fail(Exit::no_input,
         "{}: has no {}; expected an adapter of PEFT: that file and {}.safetensors. Fix: give the directory "
         "of one",
         directory, adapter_config_name, adapter_stem);
  const JsonValue json = parse_json(read_file(path, max_adapter_config_bytes), path);
  const std::string type = json.get_string("peft_type", "");
  if (type != "LORA")
    fail(Exit::data, "{}: peft_type is \"{}\"; only LORA is supported", path, printable(clipped(type)));
  for (const char* key : unsupported_keys)
    if (const JsonValue* v = json.find(key); v && !asks_for_nothing(*v))
      fail(Exit::data, "{}{}: is set, but not supported; expected it absent, null, false or empty",
           v->where(), key);
  if (const std::string bias = json.get_string("bias", "none"); bias != "none")
    fail(Exit::data, "{}: bias is \"{}\"; only none is supported", path, printable(clipped(bias)));
  StoredAdapter out;
  out.spec.rank = json.get_int("r");
  out.spec.alpha = json.get_double("lora_alpha");
  out.spec.rank_stabilized = json.get_bool("use_rslora", false);
  out.base = json.get_string("base_model_name_or_path", "");
  if (out.spec.rank < 1 || out.spec.rank > max_rank)
    fail(Exit::data, "{}: r is {}; expected 1 to {}", path, out.spec.rank, max_rank);
  if (!(out.spec.alpha > 0 && out.spec.alpha <= 1e9))
    fail(Exit::data, "{}: lora_alpha is {}; expected a number above 0", path, out.spec.alpha);

  out.score = saves_score(json);
  const SafetensorsSet files(directory, adapter_stem);
  if (out.score && !files.find(std::string(model::adapted_score_name)))
    fail(Exit::data, "{}: has no {}, which modules_to_save names", directory, model::adapted_score_name);
  std::set<std::string> with_b;
  for (const std::string& name : files.names()) {
    if (out.score && name == model::adapted_score_name) continue;
    const auto [file, tensor] = files.at(name);
    const bool a = name.ends_with(suffix_a), b = name.ends_with(suffix_b);
    if (!name.starts_with(adapter_prefix) || !(a || b))
      fail(Exit::data, "{}: tensor \"{}\" is no factor of a LoRA adapter; expected {}MODULE{} and {}",
           file->path(), printable(clipped(name)), adapter_prefix, suffix_a, suffix_b);
    const int64_t rank = tensor->shape.size() == 2 ? tensor->shape[a ? 0 : 1] : -1;
    if (rank != out.spec.rank)
      fail(Exit::data, "{}: {} has shape {}; with r = {} of {} expected {}", file->path(),
           printable(clipped(name)), shape_text(tensor->shape), out.spec.rank, adapter_config_name,
           a ? fmt::format("[{}, in]", out.spec.rank) : fmt::format("[out, {}]", out.spec.rank));
    const std::string module(
        name.substr(adapter_prefix.size(), name.size() - adapter_prefix.size() - suffix_a.size()));
    if (a)
      out.spec.targets.push_back(module);
    else
      with_b.insert(module);
  }
  std::sort(out.spec.targets.begin(), out.spec.targets.end());
  const std::set<std::string> with_a(out.spec.targets.begin(), out.spec.targets.end());
  const auto require = [&](const std::set<std::string>& have, const std::set<std::string>& other,
                           std::string_view missing) {
    for (const std::string& module : have)
      if (!other.contains(module))
        fail(Exit::data, "{}: has no {}{}{}", directory, adapter_prefix, printable(clipped(module)), missing);
  };
  require(with_a, with_b, suffix_b);
  require(with_b, with_a, suffix_a);
  if (with_a.empty()) fail(Exit::data, "{}: has no tensors", directory);
  return out;
}

std::string base_directory(const std::string& directory, const StoredAdapter& adapter) {
  if (path_exists(join_path(adapter.base, "config.json"))) return adapter.base;
  fail(Exit::no_input,
       "{}: its base model is \"{}\", which is not a model directory here. Fix: give the directory in "
       "base_model_name_or_path of {}",
       directory, printable(clipped(adapter.base)), join_path(directory, adapter_config_name));
}

std::string adapter_config_json(const model::ModelSpec& spec, const std::string& base) {
  const model::AdapterSpec& a = spec.trained.adapters;
  const bool conv1d = model::rules_of(spec.family).style == model::FileStyle::gpt2;
  const bool scalar = spec.head == model::HeadKind::scalar;
  return JsonValue::object(
             {{"peft_type", "LORA"},
              {"task_type", scalar ? "SEQ_CLS" : "CAUSAL_LM"},
              {"base_model_name_or_path",
               base.empty() ? JsonValue()
                            : JsonValue(std::filesystem::absolute(base).lexically_normal().string())},
              {"r", a.rank},
              {"lora_alpha", a.alpha},
              {"lora_dropout", static_cast<double>(a.dropout)},
              {"use_rslora", a.rank_stabilized},
              {"target_modules", JsonValue(target_modules(spec))},
              {"exclude_modules", JsonValue()},
              {"bias", "none"},
              {"fan_in_fan_out", conv1d},
              {"init_lora_weights", true},
              {"modules_to_save", scalar ? JsonValue::array({"score"}) : JsonValue()},
              {"inference_mode", true}})
             .dump(2) +
         "\n";
}

model::TrainedPart trained_part(const PolicyConfig& policy) {
  model::TrainedPart out;
  const LoraConfig& c = policy.lora;
  if (c.enabled)
    out.adapters = {.rank = c.dim,
                    .alpha = c.alpha,
                    .rank_stabilized = c.use_rslora,
                    .dropout = static_cast<float>(c.dropout),
                    .xavier = c.lora_A_init == LoraInit::xavier,
                    .targets = c.target_modules,
                    .excludes = c.exclude_modules};
  else
    out.frozen = policy.freeze;
  return out;
}

std::string other_adapter(const std::string& directory, const model::ModelSpec& spec) {
  const StoredAdapter stored = read_adapter(directory);
  const model::AdapterSpec& own = spec.trained.adapters;
  const auto differs = [&](const char* key, const auto& mine, const char* name, const auto& theirs) {
    return fmt::format("policy.lora.{} is {}, but {} of the adapter in {} is {}", key, mine, name, directory,
                       theirs);
  };
  if (own.rank != stored.spec.rank) return differs("dim", own.rank, "r", stored.spec.rank);
  if (own.alpha != stored.spec.alpha) return differs("alpha", own.alpha, "lora_alpha", stored.spec.alpha);
  if (own.rank_stabilized != stored.spec.rank_stabilized)
    return differs("use_rslora", own.rank_stabilized, "use_rslora", stored.spec.rank_stabilized);
  const std::map<std::string, std::vector<int64_t>> wanted = adapter_tensors(spec);
  const SafetensorsSet files(directory, adapter_stem);
  for (const auto& [name, shape] : wanted) {
    const auto found = files.find(name);
    if (!found)
      return fmt::format("the adapter in {} has no {}, which policy.lora.target_modules selects", directory,
                         name);
    if (found->tensor->shape != shape)
      return fmt::format("{} is {} in the adapter in {}; this model needs {}", name,
                         shape_text(found->tensor->shape), directory, shape_text(shape));
  }
  for (const std::string& name : files.names())
    if (!wanted.contains(name))
      return fmt::format(
          "the adapter in {} has {}, which policy.lora.target_modules does not select in this model",
          directory, printable(clipped(name)));
  return "";
}

std::string trained_text(const model::ModelSpec& spec) {
  const model::TrainedPart& t = spec.trained;
  if (!t.adapters && t.frozen.empty()) return "";
  const model::ParameterList list = model::make_parameters(spec);
  int64_t trained = 0;
  for (const model::Parameter& p : list.all) trained += p.trainable ? p.numel() : 0;
  const std::string counts =
      fmt::format("{} of {} parameters trained", human_count(static_cast<double>(trained)),
                  human_count(static_cast<double>(list.total())));
  if (!t.adapters) return fmt::format("{}, frozen: {}", counts, joined(t.frozen, ", ", 6));
  return fmt::format(
      "adapters of rank {} (x {:.4g}) of {}, {}", t.adapters.rank, static_cast<double>(t.adapters.scale()),
      counted(static_cast<int64_t>(modules_in(adapter_tensors(spec)).size()), "module"), counts);
}

}  // namespace nrl::train
