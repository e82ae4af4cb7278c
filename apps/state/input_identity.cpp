#include "apps/state/input_identity.h"

#include <algorithm>

#include <sys/stat.h>

#include "apps/data/text_source.h"
#include "core/base/error.h"
#include "core/io/atomic_file.h"
#include "core/io/crc32c.h"
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

// A file of records, or all of those in a directory.
FileIdentity identify_records(const std::string& path) {
  if (!is_directory(path)) return identify_file_by_samples(path);
  FileIdentity all;
  std::string texts;
  for (const data::InputFile& file : data::list_inputs({path}, "", "")) {
    const FileIdentity one = identify_file_by_samples(file.path);
    all.bytes += one.bytes;
    texts += fmt::format("{} {}\n", file.path, one.text());
  }
  all.crc32c = crc32c(texts.data(), texts.size());
  return all;
}

struct Listed {
  std::string path;
  FileIdentity (*identify)(const std::string&);
};

std::vector<Listed> model_files(const Config& config) {
  std::vector<Listed> files;
  if (!config.policy.model_name || !is_directory(*config.policy.model_name)) return files;
  for (const std::string& name : list_directory(*config.policy.model_name)) {
    const std::string path = join_path(*config.policy.model_name, name);
    if (name.ends_with(".safetensors"))
      files.push_back({path, identify_file_by_samples});
    else if (name == "config.json" || name.ends_with(".safetensors.index.json"))
      files.push_back({path, identify_file});
  }
  return files;
}

// All files of data and model; those of the data first.
std::vector<Listed> listed(const Config& config) {
  std::vector<Listed> files;
  for (const DatasetConfig* dataset : {&config.data.train, &config.data.validation})
    for (const std::string& path : dataset->data_path) {
      if (trains_on_examples(config)) {
        files.push_back({path, identify_records});
        continue;
      }
      files.push_back({path + ".idx", identify_file});
      files.push_back({path + ".bin", identify_file_by_samples});
    }
  const std::vector<Listed> model = model_files(config);
  files.insert(files.end(), model.begin(), model.end());
  return files;
}

// The sources of both data sets, whose files come first.
Inputs with_sources(const Config& config, std::vector<InputFile> files) {
  Inputs inputs;
  inputs.files = std::move(files);
  size_t at = 0;
  const auto add = [&](const DatasetConfig& dataset, std::vector<DataSource>& sources) {
    for (const std::string& path : dataset.data_path) {
      const size_t count = trains_on_examples(config) ? 1 : 2;
      NRL_CHECK(at + count <= inputs.files.size(), "{} files of the data", inputs.files.size());
      const auto content = [&](size_t i) { return inputs.files[at + i].second; };
      sources.push_back(
          {path, count == 1 ? content(0) : fmt::format("idx {}; bin {}", content(0), content(1))});
      at += count;
    }
  };
  add(config.data.train, inputs.train);
  add(config.data.validation, inputs.validation);
  return inputs;
}

std::vector<InputFile> files_from_text(const std::string& text, std::string_view whose) {
  std::vector<InputFile> files;
  const JsonValue all = parse_json(text, whose);
  for (const JsonValue& file : all.items())
    files.emplace_back(file.items().at(0).as_string(), file.items().at(1).as_string());
  return files;
}

}  // namespace

Inputs identify_inputs(const Config& config) {
  std::vector<InputFile> files;
  for (const auto& [path, identify] : listed(config)) files.emplace_back(path, identity_text(path, identify));
  return with_sources(config, std::move(files));
}

std::vector<InputFile> identify_model(const Config& config) {
  std::vector<InputFile> files;
  for (const auto& [path, identify] : model_files(config))
    files.emplace_back(path, identity_text(path, identify));
  return files;
}

std::string places_of_inputs(const Config& config) {
  std::string out;
  for (const Listed& file : listed(config)) {
    struct stat st {};
    out += file.path;
    if (::stat(file.path.c_str(), &st) == 0)
      out += fmt::format(" {} {} {} {}.{}", st.st_dev, st.st_ino, st.st_size, st.st_mtim.tv_sec,
                         st.st_mtim.tv_nsec);
    out += '\n';
  }
  return out;
}

Inputs inputs_from_text(const Config& config, const std::string& text) {
  return with_sources(config, files_from_text(text, "the input files of rank 0"));
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
    if (texts[rank].empty() || texts[rank] == texts[0]) continue;
    const std::vector<InputFile> first = files_from_text(texts[0], "the files of rank 0");
    const std::vector<InputFile> other =
        files_from_text(texts[rank], fmt::format("the files of rank {}", rank));
    for (size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      const auto file = [&](const std::vector<InputFile>& files) {
        return i < files.size() ? files[i] : InputFile{"no file", "missing"};
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
