#include "apps/train/model_source.h"

#include "apps/train/resume.h"
#include "core/io/atomic_file.h"
#include "core/io/json.h"

namespace nrl::train {
namespace {

constexpr uint64_t max_config_bytes = uint64_t{4} << 20;

// A diagnostic as one error: the text that render() shows, without its closing line.
[[noreturn]] void raise(const Diagnostic& d) {
  std::string text = render({d});
  if (const auto last = text.rfind("\n", text.size() - 2); last != std::string::npos) text.resize(last);
  if (text.starts_with("error: ")) text.erase(0, 7);
  throw Error(Exit::config, text);
}

}  // namespace

model::ModelSpec load_model_spec(const ConfigResult& result) {
  const PolicyConfig& policy = result.config.policy;
  std::string text = policy.model_json, source = "policy.model";
  if (policy.model_name) {
    source = join_path(*policy.model_name, "config.json");
    JsonValue merged = parse_json(read_file(source, max_config_bytes), source);
    const JsonValue overrides = parse_json(policy.model_json, "policy.model");
    for (const JsonMember& member : overrides.members()) merged.set(member.key, member.value);
    text = merged.dump(2);
  } else if (text == "{}") {
    raise(diagnose(result, "policy.model", "there is no model", "",
                   {"give policy.model_name (a Hugging Face directory) or policy.model with at least "
                    "model_type, vocab_size "
                    "and the sizes, e.g. {model_type: llama, vocab_size: 8192, hidden_size: 384, ...}"}));
  }
  try {
    return model::parse_model_config(text, source);
  } catch (const model::ModelConfigError& e) {
    const std::string key = e.key().empty() ? "policy.model" : "policy.model." + e.key();
    const bool ours = result.origins.count(key) > 0;
    if (policy.model_name && !ours) fail(Exit::config, "{}: {}", source, e.what());
    raise(diagnose(result, ours ? key : "policy.model", e.what()));
  }
}

model::ModelSpec load_model_directory(const std::string& directory) {
  verify_model_directory(directory);
  const std::string path = join_path(directory, "config.json");
  try {
    return model::parse_model_config(read_file(path, max_config_bytes), path);
  } catch (const model::ModelConfigError& e) {
    fail(Exit::data, "{}: {}", path, e.what());
  }
}

}  // namespace nrl::train
