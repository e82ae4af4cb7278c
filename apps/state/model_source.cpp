#include "apps/state/model_source.h"

#include <algorithm>

#include "apps/model/families/hf_config.h"
#include "apps/model/spec/trained_part.h"
#include "apps/state/adapter_files.h"
#include "core/base/text.h"
#include "core/io/atomic_file.h"
#include "core/io/checkpoint_store.h"
#include "core/io/json.h"

namespace nrl::train {
namespace {

constexpr uint64_t max_config_bytes = uint64_t{4} << 20;

// Whether a path looks like a name on the Hugging Face Hub: "meta-llama/Llama-3.2-1B", "gpt2".
bool looks_like_hub_name(const std::string& text) {
  const auto plain = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' || c == '.';
  };
  const auto slashes = std::count(text.begin(), text.end(), '/');
  return !text.empty() && slashes <= 1 && std::isalnum(static_cast<unsigned char>(text[0])) &&
         !text.ends_with('/') &&
         std::all_of(text.begin(), text.end(), [&](char c) { return c == '/' || plain(c); });
}

struct MissingModel {
  std::string problem;
  std::vector<std::string> advice;
};

// Why `path` is not a model directory.
MissingModel not_a_model(const std::string& path) {
  const std::string name = clipped(path);
  if (!path_exists(path)) {
    MissingModel out{fmt::format("there is no directory '{}'", name), {}};
    if (looks_like_hub_name(path)) {
      const std::string leaf = path.substr(path.rfind('/') + 1);
      out.advice = {"models are read from directories; names on the Hugging Face Hub are not looked up",
                    fmt::format("download it: hf download {} --local-dir {}   (or, with Git LFS: git clone "
                                "https://huggingface.co/{})",
                                path, leaf, path),
                    fmt::format("then give the directory: {}", leaf)};
    } else {
      out.advice = {"give a Hugging Face model directory (config.json and *.safetensors)"};
    }
    return out;
  }
  if (!is_directory(path))
    return {fmt::format("'{}' is a file, not a model directory", name),
            {"give the directory with config.json and *.safetensors"}};
  MissingModel out{fmt::format("'{}' has no config.json", name),
                   {"a model directory has config.json and *.safetensors"}};
  if (is_adapter(path))
    out.advice = {"it is an adapter: give it as policy.lora.adapter, and its base model here"};
  if (const auto steps = list_checkpoints(path, Validation::quick); !steps.empty())
    out.advice = {fmt::format("it has checkpoints: give one of them, the newest is {}", steps.front().path)};
  return out;
}

Diagnostic at_model_name(const ConfigResult& result, Exit exit, std::string message,
                         std::vector<std::string> notes = {}) {
  Diagnostic d = diagnose(result, "policy.model_name", std::move(message), "", std::move(notes));
  d.exit = exit;
  return d;
}

// The problem at a key that the user gave: the problem's own key, else one that it depends
// on, else policy.model_name.
std::optional<Diagnostic> at_model_key(const ConfigResult& result, const model::ModelProblem& problem,
                                       const std::string& source) {
  const auto full = [](const std::string& key) { return "policy.model." + key; };
  for (const std::string& key : problem.depends)
    if (!result.sound(full(key))) return std::nullopt;
  std::vector<std::string> keys{problem.key};
  keys.insert(keys.end(), problem.depends.begin(), problem.depends.end());
  for (const std::string& key : keys)
    if (result.origins.contains(full(key))) return diagnose(result, full(key), problem.text);
  if (result.config.policy.model_name)
    return at_model_name(result, Exit::config, fmt::format("{}: {}", source, problem.text));
  return diagnose(result, full(problem.key), problem.text);
}

/// Sets what the run trains, and reports what is wrong with that.
void set_trained_part(const ConfigResult& result, model::ModelSpec& spec, Diagnostics& problems) {
  const PolicyConfig& policy = result.config.policy;
  if (!result.sound({"policy.lora", "policy.freeze"})) return;
  spec.trained = trained_part(policy);
  for (const model::TrainedPartProblem& p : model::trained_part_problems(spec))
    problems.push_back(diagnose(result, p.key, p.text, "", {p.fix}));
  if (!problems.empty()) return;
  model::count_trained(spec);
  if (!policy.lora.enabled || !policy.lora.adapter) return;
  const auto report = [&](Exit exit, const std::string& text, std::vector<std::string> notes) {
    problems.push_back(diagnose(result, "policy.lora.adapter", text, "", std::move(notes)));
    problems.back().exit = exit;
  };
  try {
    if (const std::string text = other_adapter(*policy.lora.adapter, spec); !text.empty())
      report(Exit::config, text, {"it belongs to another model, or to other keys of policy.lora"});
  } catch (const Error& e) {
    report(e.code(), e.what(), {});
  }
}

}  // namespace

ModelCheck check_model(const ConfigResult& result) {
  ModelCheck out;
  const PolicyConfig& policy = result.config.policy;
  std::string text = policy.model_json, source = "policy.model";
  // A missing model has already been reported by the checks of the configuration.
  if (!result.sound("policy.model_name") || (!policy.model_name && text == "{}")) return out;
  if (policy.model_name) {
    source = join_path(*policy.model_name, "config.json");
    if (!path_exists(source)) {
      const MissingModel missing = not_a_model(*policy.model_name);
      out.problems.push_back(
          at_model_name(result, Exit::no_input, "policy.model_name: " + missing.problem, missing.advice));
      return out;
    }
    try {
      JsonValue merged = parse_json(read_file(source, max_config_bytes), source);
      const JsonValue overrides = parse_json(policy.model_json, "policy.model");
      for (const JsonMember& member : overrides.members()) merged.set(member.key, member.value);
      text = merged.dump(2);
    } catch (const Error& e) {
      out.problems.push_back(at_model_name(result, e.code(), e.what()));
      return out;
    }
  }
  try {
    out.spec = model::parse_model_config(text, source);
    // A config.json may have keys for other programs, but a key that the user gives must have an effect.
    for (const std::string& key : out.spec->unread_keys)
      if (result.origins.contains("policy.model." + key))
        out.problems.push_back(
            diagnose(result, "policy.model." + key,
                     fmt::format("policy.model.{} has no effect in this model (model_type {})", key,
                                 name_of(out.spec->family)),
                     "remove it"));
    if (result.config.algorithm == Algorithm::rm) model::use_scalar_head(*out.spec);
    if (out.problems.empty()) set_trained_part(result, *out.spec, out.problems);
    if (!out.problems.empty()) out.spec.reset();
  } catch (const model::ModelConfigError& e) {
    for (const model::ModelProblem& problem : e.problems())
      if (auto d = at_model_key(result, problem, source)) out.problems.push_back(std::move(*d));
  }
  return out;
}

model::ModelSpec load_model_spec(const ConfigResult& config) {
  ModelCheck check = check_model(config);
  if (check.spec) return std::move(*check.spec);
  if (check.problems.empty())
    fail(Exit::config, "no model is configured. Fix: set policy.model_name or policy.model");
  raise(check.problems);
}

std::string find_model_directory(const std::string& path, std::string& note) {
  if (path_exists(join_path(path, "config.json")) || is_adapter(path)) return path;
  if (is_directory(path) && !list_checkpoints(path, Validation::quick).empty()) {
    const ResumePoint found = find_resume(path, Validation::quick);
    for (const std::string& warning : found.warnings) note += warning + "\n";
    if (!found.checkpoint) fail(Exit::data, "{}: none of its checkpoints is valid\n{}", path, note);
    note += fmt::format("the newest checkpoint in {} is {}", path, found.checkpoint->path);
    return found.checkpoint->path;
  }
  const MissingModel missing = not_a_model(path);
  std::string advice;
  for (const std::string& line : missing.advice) advice += "\n" + line;
  fail(Exit::no_input, "{}{}", missing.problem, advice);
}

void require_logits(const model::ModelSpec& spec, std::string_view command, const std::string& directory) {
  if (spec.head == model::HeadKind::vocabulary) return;
  fail(Exit::data,
       "{}: {} is a reward model, which gives a sequence a score; expected a model that predicts tokens. "
       "Fix: give a ...ForCausalLM",
       command, directory);
}

model::ModelSpec load_model_directory(const std::string& directory, VerifyShare share) {
  verify_model_directory(directory, share);
  if (is_adapter(directory)) {
    const StoredAdapter adapter = read_adapter(directory);
    const std::string base = base_directory(directory, adapter);
    model::ModelSpec spec = load_model_directory(base, share);
    spec.trained.adapters = adapter.spec;
    if (adapter.score) model::use_scalar_head(spec);
    if (const auto problems = model::trained_part_problems(spec); !problems.empty())
      fail(Exit::data, "{}: is no adapter of the model in {}: {}", directory, base, problems.front().text);
    if (const std::string text = other_adapter(directory, spec); !text.empty())
      fail(Exit::data, "{}: is no adapter of the model in {}: {}", directory, base, text);
    model::count_trained(spec);
    return spec;
  }
  const std::string path = join_path(directory, "config.json");
  try {
    return model::parse_model_config(read_file(path, max_config_bytes), path);
  } catch (const model::ModelConfigError& e) {
    fail(Exit::data, "{}: {}", path, e.what());
  }
}

}  // namespace nrl::train
