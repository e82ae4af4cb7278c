#include "apps/data/tokenizer.h"

#include "apps/data/hf_pipeline.h"
#include "apps/data/tokenizer_traits.h"
#include "core/base/error.h"
#include "core/io/atomic_file.h"
#include "core/io/json.h"

namespace nrl::data {
namespace {

constexpr int32_t end_of_document = 256;
constexpr std::string_view end_text = "<|endoftext|>";

class ByteTokenizer final : public Tokenizer {
 public:
  explicit ByteTokenizer(TokenizerTraits traits) : Tokenizer(std::move(traits)) {
    if (!traits_.named) traits_.special_tokens = {{"eos_token", std::string(end_text)}};
  }
  int64_t encode(std::string_view text, std::vector<int32_t>& out) const override {
    const size_t at = out.size();
    out.resize(at + text.size());
    for (size_t i = 0; i < text.size(); ++i) out[at + i] = static_cast<uint8_t>(text[i]);
    return 0;
  }
  int64_t encode_spans(std::string_view text, std::vector<int32_t>& ids,
                       std::vector<int64_t>& ends) const override {
    for (size_t i = 0; i < text.size(); ++i) ends.push_back(static_cast<int64_t>(i + 1));
    return encode(text, ids);
  }
  std::string decode(std::span<const int32_t> ids) const override {
    std::string text;
    for (const int32_t id : ids) {
      if (id < 0 || id > end_of_document)
        fail(Exit::data, "token {} is not in the vocabulary of {}", id, vocab_size());
      if (id != end_of_document) text += static_cast<char>(id);
    }
    return text;
  }
  int64_t vocab_size() const override { return end_of_document + 1; }
  std::optional<int32_t> bos() const override { return std::nullopt; }
  std::optional<int32_t> eos() const override { return end_of_document; }
  std::optional<int32_t> id_of(std::string_view token) const override {
    if (token == end_text) return end_of_document;
    return token.size() == 1 ? std::optional<int32_t>(static_cast<uint8_t>(token[0])) : std::nullopt;
  }
  std::string_view kind() const override { return "bytes"; }
  std::vector<SpecialToken> special_token_list() const override {
    return {{std::string(end_text), end_of_document}};
  }

  // For other programs the same as a byte-level BPE without merges; tokenizer_in() recognizes
  // it by the second file.
  std::vector<File> files() const override {
    JsonValue vocab = JsonValue::object();
    for (int b = 0; b < 256; ++b) vocab.set(byte_level_text(std::string(1, static_cast<char>(b))), b);
    const JsonValue byte_level = JsonValue::object(
        {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}});
    const JsonValue end = JsonValue::object({{"id", end_of_document},
                                             {"content", end_text},
                                             {"single_word", false},
                                             {"lstrip", false},
                                             {"rstrip", false},
                                             {"normalized", false},
                                             {"special", true}});
    const JsonValue model = JsonValue::object({{"type", "BPE"},
                                               {"dropout", nullptr},
                                               {"unk_token", nullptr},
                                               {"continuing_subword_prefix", nullptr},
                                               {"end_of_word_suffix", nullptr},
                                               {"fuse_unk", false},
                                               {"byte_fallback", false},
                                               {"ignore_merges", false},
                                               {"vocab", vocab},
                                               {"merges", JsonValue::array()}});
    const JsonValue tokenizer = JsonValue::object({{"version", "1.0"},
                                                   {"truncation", nullptr},
                                                   {"padding", nullptr},
                                                   {"added_tokens", JsonValue::array({end})},
                                                   {"normalizer", nullptr},
                                                   {"pre_tokenizer", byte_level},
                                                   {"post_processor", nullptr},
                                                   {"decoder", byte_level},
                                                   {"model", model}});
    const JsonValue config = JsonValue::object({{"tokenizer_class", "PreTrainedTokenizerFast"},
                                                {"clean_up_tokenization_spaces", false},
                                                {"eos_token", end_text},
                                                {"nrl_tokenizer", "bytes"}});
    const JsonValue special = JsonValue::object({{"eos_token", end_text}});
    std::vector<File> all = {{"tokenizer.json", tokenizer.dump(1) + "\n", true},
                             {"tokenizer_config.json", config.dump(1) + "\n", true},
                             {"special_tokens_map.json", special.dump(1) + "\n", true}};
    carry(traits_.files, all);
    for (File& file : all) file.derived = true;  // no other file determines the ids
    return all;
  }
};

}  // namespace

std::unique_ptr<Tokenizer> make_byte_tokenizer(TokenizerTraits traits) {
  return std::make_unique<ByteTokenizer>(std::move(traits));
}

std::unique_ptr<Tokenizer> make_tokenizer(const std::string& spec) {
  const auto after = [&](std::string_view prefix) { return spec.substr(prefix.size()); };
  if (spec == "bytes") return make_byte_tokenizer();
  if (spec.starts_with("sentencepiece:")) return load_sentencepiece(after("sentencepiece:"));
  if (spec.starts_with("hf:")) return load_hf_tokenizer(after("hf:"));
  if (is_directory(spec)) return tokenizer_in(spec);
  fail(Exit::usage,
       "tokenizer '{}': expected bytes, sentencepiece:MODEL, hf:tokenizer.json, or a directory with a "
       "tokenizer",
       spec);
}

std::unique_ptr<Tokenizer> tokenizer_in(const std::string& directory) {
  const std::string json = join_path(directory, "tokenizer.json"),
                    model = join_path(directory, "tokenizer.model");
  const std::string config = join_path(directory, "tokenizer_config.json");
  // Prefers the original file over files that this program derived from it.
  const std::string derived_from =
      path_exists(config) ? read_json(config).get_string("nrl_tokenizer", "") : std::string();
  if (derived_from == "bytes" && path_exists(json))
    return make_byte_tokenizer(read_tokenizer_traits(join_path(directory, "")));
  if (derived_from == "sentencepiece" && path_exists(model)) return load_sentencepiece(model);
  if (path_exists(json)) return load_hf_tokenizer(json);
  if (path_exists(model)) return load_sentencepiece(model);
  fail(Exit::no_input, "{}: it has neither tokenizer.json nor tokenizer.model", directory);
}

}  // namespace nrl::data
