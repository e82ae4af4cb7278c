#include "apps/data/tokenizer_traits.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>

#include "apps/data/unicode.h"
#include "core/base/error.h"
#include "core/io/atomic_file.h"
#include "core/io/json.h"

namespace nrl::data {
namespace {

using Traits = TokenizerTraits;

constexpr uint64_t max_file_bytes = 64ull << 20;
constexpr std::array<const char*, 7> token_names = {"bos_token", "eos_token", "unk_token", "sep_token",
                                                    "pad_token", "cls_token", "mask_token"};

// The text of a token, which may be an object with a member "content"; null if there is none.
const std::string* token_text(const JsonValue& value) {
  if (value.is_object()) return &value.get_string("content");
  return value.is_null() ? nullptr : &value.as_string();
}

// Adds the special tokens that a file names. `replace`: also those that have a name already.
void read_special_tokens(const JsonValue& json, bool replace, Traits& traits) {
  const auto name = [&](const std::string& key, const JsonValue& value) {
    const std::string* text = token_text(value);
    if (text && (replace || !traits.special_tokens.contains(key))) traits.special_tokens[key] = *text;
  };
  const auto add = [&](const JsonValue& value) {
    const std::string* text = token_text(value);
    if (text &&
        std::find(traits.additional.begin(), traits.additional.end(), *text) == traits.additional.end())
      traits.additional.push_back(*text);
  };
  for (const char* key : token_names)
    if (const JsonValue* value = json.find(key)) name(key, *value);
  for (const char* key : {"additional_special_tokens", "extra_special_tokens"}) {
    const JsonValue* more = json.find(key);
    if (!more || more->is_null()) continue;
    if (more->is_object()) {
      for (const JsonMember& member : more->members()) name(member.key, member.value);
    } else {
      for (const JsonValue& value : more->items()) add(value);
    }
  }
}

// The templates of tokenizer_config.json: one text, or a list of named ones.
void read_templates(const JsonValue& config, Traits& traits) {
  const JsonValue* value = config.find("chat_template");
  if (!value || value->is_null()) return;
  if (!value->is_array()) {
    traits.chat_templates.emplace("default", value->as_string());
    return;
  }
  for (const JsonValue& each : value->items())
    traits.chat_templates[each.get_string("name")] = each.get_string("template");
}

// Reads a template from a file.
std::string read_template(const std::string& path) {
  std::string text = read_file(path, max_file_bytes);
  if (const size_t bad = find_invalid_utf8(text); bad != std::string::npos) {
    const std::string_view before = std::string_view(text).substr(0, bad);
    const size_t line = before.rfind('\n') + 1;  // npos + 1 == 0
    fail(Exit::data, "{}:{}:{}: not valid UTF-8. Fix: store the template as UTF-8", path,
         std::count(before.begin(), before.end(), '\n') + 1, bad - line + 1);
  }
  return text;
}

// Adds the end tokens of a model's configuration.
void read_eos_ids(const JsonValue& config, Traits& traits) {
  const auto add = [&](const JsonValue& value) {
    const int64_t id = value.as_int();
    if (id < 0 || id > INT32_MAX)
      fail(Exit::data, "{}eos_token_id {}: expected a token id", value.where(), id);
    traits.eos_ids.push_back(static_cast<int32_t>(id));
  };
  const JsonValue* ids = config.find("eos_token_id");
  if (!ids || ids->is_null()) return;
  if (!ids->is_array()) return add(*ids);
  for (const JsonValue& id : ids->items()) add(id);
}

}  // namespace

TokenizerTraits read_tokenizer_traits(const std::string& stem) {
  Traits traits;
  const auto parsed = [&](const char* name) {
    const std::string path = stem + name;
    if (!path_exists(path)) return JsonValue::object();
    traits.files.push_back({name, read_file(path, max_file_bytes)});
    JsonValue json = parse_json(traits.files.back().content, path);
    json.members();  // refuses anything but an object
    return json;
  };
  const JsonValue config = parsed("tokenizer_config.json"), map = parsed("special_tokens_map.json");
  traits.named = !traits.files.empty();
  traits.derived_from = config.get_string("nrl_tokenizer", "");
  read_special_tokens(config, true, traits);
  // As in transformers: older tokenizers keep their special tokens in the second file.
  read_special_tokens(map, !config.contains("added_tokens_decoder"), traits);

  read_templates(config, traits);
  if (const std::string path = stem + "chat_template.jinja"; path_exists(path)) {
    traits.chat_templates["default"] = read_template(path);
    traits.files.push_back({"chat_template.jinja", traits.chat_templates["default"]});
  }
  if (const std::string directory = stem + "chat_templates"; is_directory(directory)) {
    constexpr std::string_view suffix = ".jinja";
    for (const std::string& name : list_directory(directory))
      if (name.ends_with(suffix) && name.size() > suffix.size())
        traits.chat_templates[name.substr(0, name.size() - suffix.size())] =
            read_template(join_path(directory, name));
  }

  read_eos_ids(parsed("generation_config.json"), traits);
  if (const std::string path = stem + "config.json"; path_exists(path)) {
    const JsonValue model = read_json(path);
    read_eos_ids(model, traits);
    // Models of several modalities have the language model's configuration inside.
    if (const JsonValue* text = model.find("text_config"); text && text->is_object())
      read_eos_ids(*text, traits);
  }
  return traits;
}

void carry(const std::vector<TokenizerFile>& files, std::vector<TokenizerFile>& all) {
  for (const TokenizerFile& file : files) {
    const auto same =
        std::find_if(all.begin(), all.end(), [&](const auto& other) { return other.name == file.name; });
    if (same == all.end()) {
      all.push_back(file);
    } else if (same->content != file.content) {
      *same = file;
    }
  }
}

}  // namespace nrl::data
