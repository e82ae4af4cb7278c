#include "apps/state/hf_files.h"

#include <algorithm>
#include <vector>

#include "apps/data/chat/template_choice.h"
#include "apps/data/manifest.h"
#include "apps/model/families/hf_config.h"
#include "core/base/error.h"
#include "core/config/config.h"
#include "core/io/atomic_file.h"
#include "core/io/json.h"

namespace nrl::train {
namespace {

using data::Tokenizer;

constexpr uint64_t max_bytes = uint64_t{64} << 20;
constexpr const char* template_name = "chat_template.jinja";
constexpr const char* tokenizer_files[] = {"tokenizer.json",
                                           "tokenizer.model",
                                           "tokenizer_config.json",
                                           "spiece.model",
                                           "special_tokens_map.json",
                                           "added_tokens.json",
                                           "vocab.json",
                                           "merges.txt",
                                           template_name,
                                           "chat_template.json"};
constexpr const char* generation_config_name = "generation_config.json";

bool contains(const std::vector<Tokenizer::File>& files, std::string_view name) {
  return std::any_of(files.begin(), files.end(), [&](const Tokenizer::File& f) { return f.name == name; });
}

void copy_if_present(const std::string& directory, const char* name, std::vector<Tokenizer::File>& files) {
  const std::string path = join_path(directory, name);
  if (path_exists(path)) files.push_back({name, read_file(path, max_bytes)});
}

void use(const Tokenizer& tokenizer, HfFiles& hf) {
  hf.bos = tokenizer.bos();
  hf.eos = tokenizer.eos();
  const auto named = tokenizer.special_tokens().find("pad_token");
  if (named != tokenizer.special_tokens().end()) hf.pad = tokenizer.id_of(named->second);
  if (hf.pad == hf.eos) hf.pad.reset();
  // Derived files could contradict a tokenizer_config.json that was copied.
  const bool complete = contains(hf.files, "tokenizer_config.json");
  for (const Tokenizer::File& file : tokenizer.files())
    if (!contains(hf.files, file.name) && !(complete && file.derived)) hf.files.push_back(file);
}

bool has_tokenizer(const std::string& directory) {
  return path_exists(join_path(directory, "tokenizer.json")) ||
         path_exists(join_path(directory, "tokenizer.model"));
}

// The files of the tokenizer.
HfFiles collect_tokenizer_files(const Config& c) {
  HfFiles hf;
  const auto& start = c.policy.model_name;
  const bool other_tokenizer = c.policy.tokenizer.name && c.policy.tokenizer.name != start;
  const auto copy_all = [&](const std::string& directory) {
    for (const char* name : tokenizer_files) copy_if_present(directory, name, hf.files);
  };
  if (other_tokenizer) {
    const std::string& name = *c.policy.tokenizer.name;
    if (is_directory(name)) copy_all(name);
    use(*data::make_tokenizer(name), hf);
    const JsonValue overrides = parse_json(c.policy.model_json, "policy.model");
    hf.keep_config_ids = !start || overrides.contains("eos_token_id");
    return hf;
  }
  hf.keep_config_ids = true;
  if (start) {
    copy_all(*start);
    copy_if_present(*start, generation_config_name, hf.files);
    if (has_tokenizer(*start)) {
      try {
        use(*data::tokenizer_in(*start), hf);
      } catch (const Error&) {
        // An unsupported tokenizer is copied nevertheless: training only reads token ids.
      }
      return hf;
    }
  }
  const std::string& prefix = c.data.train.data_path.front();
  if (data::read_manifest(prefix)) use(*data::tokenizer_of_dataset(prefix), hf);
  return hf;
}

// Replaces the tokenizer's chat template by the one that rendered the run's examples.
void use_template_of_run(const Config& c, HfFiles& hf) {
  const std::string& choice = c.policy.tokenizer.chat_template;
  if (choice == "default" || !trains_on_examples(c)) return;
  const auto tokenizer = tokenizer_of_run(c);
  const auto chosen = tokenizer ? data::choose_chat_template(choice, *tokenizer) : std::nullopt;
  if (!chosen) return;
  std::erase_if(hf.files, [](const Tokenizer::File& file) { return file.name == template_name; });
  hf.files.push_back({template_name, chosen->source});
}

}  // namespace

HfFiles collect_hf_files(const Config& c) {
  HfFiles hf = collect_tokenizer_files(c);
  use_template_of_run(c, hf);
  return hf;
}

std::unique_ptr<Tokenizer> tokenizer_of_run(const Config& c) {
  if (c.policy.tokenizer.name) return data::make_tokenizer(*c.policy.tokenizer.name);
  if (c.policy.model_name && has_tokenizer(*c.policy.model_name))
    return data::tokenizer_in(*c.policy.model_name);
  const std::string& prefix = c.data.train.data_path.front();
  return data::read_manifest(prefix) ? data::tokenizer_of_dataset(prefix) : nullptr;
}

std::string hf_config_json(const model::ModelSpec& spec, std::string_view dtype, const HfFiles& hf) {
  JsonValue json = parse_json(model::hugging_face_config(spec, dtype), "config.json");
  const auto set = [&](const char* key, std::optional<int32_t> id) {
    if (hf.keep_config_ids && json.contains(key)) return;
    // Without the key transformers uses the family's default, e.g. 50256 for GPT-2.
    json.set(key, id && *id < spec.vocab_size ? JsonValue(*id) : JsonValue());
  };
  set("bos_token_id", hf.bos);
  set("eos_token_id", hf.eos);
  const JsonValue* const pad = json.find("pad_token_id");
  if (spec.head == model::HeadKind::scalar && hf.pad && *hf.pad < spec.vocab_size && (!pad || pad->is_null()))
    json.set("pad_token_id", *hf.pad);
  return json.dump(2) + "\n";
}

std::string hf_generation_config(const std::string& config_json, const HfFiles& hf) {
  if (contains(hf.files, generation_config_name)) return {};
  const JsonValue config = parse_json(config_json, "config.json");
  JsonValue json = JsonValue::object({{"_from_model_config", true}});
  for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"})
    if (const JsonValue* id = config.find(key); id && !id->is_null()) json.set(key, *id);
  return json.dump(2) + "\n";
}

std::string auto_tokenizer_warning(const model::ModelSpec& spec, const HfFiles& hf) {
  const auto content = [&](std::string_view name) -> std::string_view {
    for (const Tokenizer::File& file : hf.files)
      if (file.name == name) return file.content;
    return {};
  };
  const std::string_view json = content("tokenizer.json");
  const bool library =
      content("tokenizer_config.json").find("BertGenerationTokenizer") != std::string_view::npos;
  const char* instead = nullptr;
  const model::AutoTokenizer rule = model::rules_of(spec.family).auto_tokenizer;
  if (rule == model::AutoTokenizer::qwen2) {
    const bool of_qwen2 =
        json.find("\"NFC\"") != std::string_view::npos &&
        json.find("|\\\\p{N}| ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|") != std::string_view::npos;
    if (library || (!json.empty() && !of_qwen2))
      instead = library ? "BertGenerationTokenizer" : "PreTrainedTokenizerFast";
  } else if (rule == model::AutoTokenizer::ignores_class && library) {
    instead = "BertGenerationTokenizer";
  }
  if (!instead) return {};
  return fmt::format(
      "AutoTokenizer of transformers 5 ignores the tokenizer class of {} checkpoints: its token ids differ "
      "from those of this run. Fix: load the tokenizer with {}.from_pretrained(CHECKPOINT)",
      name_of(spec.family), instead);
}

}  // namespace nrl::train
