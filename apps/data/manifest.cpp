#include "apps/data/manifest.h"

#include "core/base/error.h"
#include "core/base/text.h"
#include "core/io/atomic_file.h"
#include "core/io/json.h"

namespace nrl::data {
namespace {

constexpr const char* format_version = "nrl-train dataset";

std::string manifest_path(const std::string& prefix) {
  return prefix + ".dataset.json";
}

std::string name_of(const std::string& path) {
  return path.substr(path.rfind('/') + 1);
}

}  // namespace

std::vector<Tokenizer::File> dataset_companions(const std::string& prefix, const Tokenizer& tokenizer,
                                                DatasetManifest manifest) {
  std::vector<Tokenizer::File> files;
  manifest.tokenizer_kind = tokenizer.kind();
  manifest.vocab_size = tokenizer.vocab_size();
  for (const auto& [name, content, derived] : tokenizer.files()) {
    if (derived) continue;
    const std::string path = prefix + (name == "tokenizer.model" ? ".model" : "." + name);
    if (files.empty()) manifest.tokenizer_file = name_of(path);
    files.push_back({path, content});
  }
  JsonValue json = JsonValue::object({{"format", format_version},
                                      {"version", 1},
                                      {"tokenizer", manifest.tokenizer_kind},
                                      {"tokenizer_file", manifest.tokenizer_file},
                                      {"vocab_size", manifest.vocab_size},
                                      {"eod", manifest.eod ? JsonValue(*manifest.eod) : JsonValue()},
                                      {"documents", manifest.documents},
                                      {"tokens", manifest.tokens},
                                      {"text_bytes", manifest.text_bytes}});
  files.push_back({manifest_path(prefix), json.dump(1) + "\n"});
  return files;
}

std::optional<DatasetManifest> read_manifest(const std::string& prefix) {
  const std::string path = manifest_path(prefix);
  if (!path_exists(path)) return std::nullopt;
  const JsonValue json = read_json(path);
  if (json.get_string("format") != format_version)
    fail(Exit::data, "{}: format '{}'; expected '{}'", path, json.get_string("format"), format_version);
  if (const int64_t version = json.get_int("version"); version != 1)
    fail(Exit::data, "{}: version {}; expected 1", path, version);
  DatasetManifest manifest;
  manifest.tokenizer_kind = json.get_string("tokenizer");
  manifest.tokenizer_file = json.get_string("tokenizer_file");
  if (!manifest.tokenizer_file.empty() && !is_plain_name(manifest.tokenizer_file))
    fail(Exit::data, "{}: tokenizer_file '{}' must be a file name without directories", path,
         manifest.tokenizer_file);
  manifest.vocab_size = json.get_int("vocab_size");
  if (manifest.vocab_size <= 0 || manifest.vocab_size > INT32_MAX)
    fail(Exit::data, "{}: vocab_size {} is out of range", path, manifest.vocab_size);
  if (const int64_t eod = json.get_int("eod", -1); eod >= 0 && eod < manifest.vocab_size)
    manifest.eod = static_cast<int32_t>(eod);
  manifest.documents = json.get_int("documents");
  manifest.tokens = json.get_int("tokens");
  manifest.text_bytes = json.get_int("text_bytes", 0);
  return manifest;
}

std::unique_ptr<Tokenizer> tokenizer_of_dataset(const std::string& prefix) {
  const auto manifest = read_manifest(prefix);
  if (!manifest)
    fail(Exit::no_input,
         "{}: no such file; it names the tokenizer of the dataset. Fix: prepare the data with nrl-train "
         "prepare",
         manifest_path(prefix));
  const std::string file = join_path(parent_path(prefix), manifest->tokenizer_file);
  std::unique_ptr<Tokenizer> tokenizer;
  if (manifest->tokenizer_kind == "bytes") {
    tokenizer = make_byte_tokenizer();
  } else if (manifest->tokenizer_kind == "sentencepiece") {
    tokenizer = load_sentencepiece(file);
  } else if (manifest->tokenizer_kind == "hf") {
    tokenizer = load_hf_tokenizer(file);
  } else {
    fail(Exit::data, "{}: unknown tokenizer '{}'; expected bytes, sentencepiece or hf", manifest_path(prefix),
         manifest->tokenizer_kind);
  }
  if (tokenizer->vocab_size() != manifest->vocab_size)
    fail(Exit::data, "{}: not the tokenizer of the dataset: it has {} tokens; expected {}", file,
         tokenizer->vocab_size(), manifest->vocab_size);
  return tokenizer;
}

std::string other_tokenizer_warning(const std::string& prefix, const std::string& spec) {
  const auto manifest = read_manifest(prefix);
  if (!manifest) return {};
  try {
    // The common case, without reading vocabularies: the dataset has a copy of the file.
    constexpr uint64_t largest = 1 << 30;
    const std::string ours = join_path(parent_path(prefix), manifest->tokenizer_file);
    for (const char* name : {"tokenizer.json", "tokenizer.model"})
      if (const std::string theirs = join_path(spec, name);
          !manifest->tokenizer_file.empty() && path_exists(theirs))
        if (read_file(ours, largest) == read_file(theirs, largest)) return {};
    const auto of_data = tokenizer_of_dataset(prefix), given = make_tokenizer(spec);
    constexpr std::string_view probe =
        "The quick brown fox jumps over 13 lazy dogs: int main() { return 0; }";
    if (of_data->encode(probe) == given->encode(probe)) return {};
  } catch (const Error&) {
    return {};  // reported where it is needed
  }
  return fmt::format("{} was made with another tokenizer than {} has: its token ids mean other text there",
                     clipped(prefix), clipped(spec));
}

}  // namespace nrl::data
