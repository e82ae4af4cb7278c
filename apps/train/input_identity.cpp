#include "apps/train/input_identity.h"

#include <algorithm>

#include "core/base/error.h"
#include "core/io/atomic_file.h"
#include "core/io/file_identity.h"
#include "core/io/json.h"

namespace nrl::train {
namespace {

std::string identity_text(const std::string& path, FileIdentity (*identify)(const std::string&)) {
  if (!path_exists(path)) return "missing";
  try {
    return identify(path).text();
  } catch (const Error& e) {
    return e.what();
  }
}

void add_sources(const DatasetConfig& config, std::vector<DataSource>& sources,
                 std::vector<InputFile>& files) {
  for (const std::string& prefix : config.data_path) {
    const InputFile index{prefix + ".idx", identity_text(prefix + ".idx", identify_file)};
    const InputFile tokens{prefix + ".bin", identity_text(prefix + ".bin", identify_file_by_samples)};
    sources.push_back({prefix, fmt::format("idx {}; bin {}", index.second, tokens.second)});
    files.push_back(index);
    files.push_back(tokens);
  }
}

}  // namespace

Inputs identify_inputs(const Config& config) {
  Inputs inputs;
  add_sources(config.data.train, inputs.train, inputs.files);
  add_sources(config.data.validation, inputs.validation, inputs.files);
  if (!config.policy.model_name || !is_directory(*config.policy.model_name)) return inputs;
  for (const std::string& name : list_directory(*config.policy.model_name)) {
    const std::string path = join_path(*config.policy.model_name, name);
    if (name.ends_with(".safetensors")) {
      inputs.files.emplace_back(path, identity_text(path, identify_file_by_samples));
    } else if (name == "config.json" || name.ends_with(".safetensors.index.json")) {
      inputs.files.push_back(identify_input(path));
    }
  }
  return inputs;
}

InputFile identify_input(const std::string& path) {
  return {path, identity_text(path, identify_file)};
}

std::string to_text(const std::vector<InputFile>& files) {
  JsonValue all = JsonValue::array();
  for (const auto& [path, identity] : files) all.push_back(JsonValue::array({path, identity}));
  return all.dump();
}

void require_same_files(const std::vector<std::string>& texts, const std::vector<std::string>& hosts) {
  constexpr std::string_view fix =
      "Fix: give every node the same copy, or read it from a file system that they share";
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    if (texts[rank] == texts[0]) continue;
    const JsonValue first_json = parse_json(texts[0], "the files of rank 0");
    const JsonValue other_json = parse_json(texts[rank], fmt::format("the files of rank {}", rank));
    const JsonValue::Array &first = first_json.items(), &other = other_json.items();
    for (size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      const auto file = [&](const JsonValue::Array& files) {
        if (i >= files.size()) return InputFile{"no file", "missing"};
        return InputFile{files[i].items()[0].as_string(), files[i].items()[1].as_string()};
      };
      const InputFile a = file(first), b = file(other);
      if (a == b) continue;
      fail(Exit::data,
           "input files differ between the ranks: rank 0 ({}) sees {} ({}), rank {} ({}) sees {} ({}). {}",
           hosts[0], a.first, a.second, rank, hosts[rank], b.first, b.second, fix);
    }
  }
}

}  // namespace nrl::train
