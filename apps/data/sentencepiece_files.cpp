// Derives the files from which other programs read a sentencepiece model.

#include "apps/data/sentencepiece_bpe.h"
#include "core/io/json.h"

namespace nrl::data {
namespace {

using Type = SentencePieceModel::PieceType;

JsonValue step(const char* type, std::initializer_list<std::pair<std::string, JsonValue>> members) {
  JsonValue json = JsonValue::object({{"type", type}});
  for (const auto& [key, value] : members) json.set(key, value);
  return json;
}

JsonValue replace(const char* kind, const char* pattern, const char* content) {
  return step("Replace", {{"pattern", JsonValue::object({{kind, pattern}})}, {"content", content}});
}

JsonValue normalizer_of(const SentencePieceModel& model) {
  JsonValue steps = JsonValue::array();
  if (model.remove_extra_whitespaces) {
    steps.push_back(replace("Regex", "\\A +", ""));
    steps.push_back(replace("Regex", " +", " "));
  }
  if (model.add_dummy_prefix) steps.push_back(step("Prepend", {{"prepend", "\u2581"}}));
  steps.push_back(replace("String", " ", "\u2581"));
  if (model.remove_extra_whitespaces) steps.push_back(replace("Regex", "\u2581+\\z", ""));
  return step("Sequence", {{"normalizers", steps}});
}

JsonValue decoder_of(const SentencePieceModel& model) {
  JsonValue steps =
      JsonValue::array({replace("String", "\u2581", " "), step("ByteFallback", {}), step("Fuse", {})});
  if (model.add_dummy_prefix) steps.push_back(step("Strip", {{"content", " "}, {"start", 1}, {"stop", 0}}));
  return step("Sequence", {{"decoders", steps}});
}

JsonValue bpe_of(const SentencePieceModel& model, const std::string& unknown) {
  JsonObject vocab;
  for (size_t id = 0; id < model.pieces.size(); ++id) vocab.set(model.pieces[id].text, id);
  JsonValue::Array merges;
  const auto text = [&](int32_t id) { return model.pieces[id].text; };
  for (const BpeModel::Merge& merge : sentencepiece_merges(model))
    merges.push_back(JsonValue::array({text(merge.left), text(merge.right)}));
  return step("BPE", {{"dropout", nullptr},
                      {"unk_token", unknown},
                      {"continuing_subword_prefix", nullptr},
                      {"end_of_word_suffix", nullptr},
                      {"fuse_unk", true},
                      {"byte_fallback", model.byte_fallback},
                      {"ignore_merges", false},
                      {"vocab", JsonValue(std::move(vocab))},
                      {"merges", JsonValue(std::move(merges))}});
}

JsonValue added_tokens_of(const SentencePieceModel& model) {
  JsonValue tokens = JsonValue::array();
  for (size_t id = 0; id < model.pieces.size(); ++id) {
    const auto& piece = model.pieces[id];
    if (piece.type != Type::control && piece.type != Type::unknown) continue;
    tokens.push_back(JsonValue::object({{"id", id},
                                        {"content", piece.text},
                                        {"single_word", false},
                                        {"lstrip", false},
                                        {"rstrip", false},
                                        {"normalized", false},
                                        {"special", true}}));
  }
  return tokens;
}

// Whether tokenizer.json can represent the model exactly. With user-defined pieces it cannot: as added tokens
// they would split the text before normalization, while sentencepiece normalizes the whole text. Rules that
// rewrite characters remain in the model file.
bool fits_tokenizer_json(const SentencePieceModel& model) {
  for (const auto& piece : model.pieces)
    if (piece.type == Type::user_defined) return false;
  return model.charsmap.empty() && SentencePieceBpe::unsupported_reason(model).empty();
}

}  // namespace

std::vector<Tokenizer::File> sentencepiece_companions(const SentencePieceModel& model,
                                                      const std::string& bytes, int32_t bos, int32_t eos) {
  std::string unknown;
  for (const auto& piece : model.pieces)
    if (piece.type == Type::unknown) unknown = piece.text;
  const auto name = [&](int32_t id) {
    return id >= 0 ? JsonValue(model.pieces.at(static_cast<size_t>(id)).text) : JsonValue();
  };
  const bool fits = fits_tokenizer_json(model);
  const JsonValue names =
      JsonValue::object({{"bos_token", name(bos)}, {"eos_token", name(eos)}, {"unk_token", unknown}});
  JsonValue special = JsonValue::object();
  // BertGenerationTokenizer is the class of transformers that passes text unchanged to the sentencepiece
  // library; LlamaTokenizer replaces the model's normalizer.
  JsonValue config =
      JsonValue::object({{"tokenizer_class", fits ? "PreTrainedTokenizerFast" : "BertGenerationTokenizer"},
                         {"clean_up_tokenization_spaces", false},
                         {"nrl_tokenizer", "sentencepiece"}});
  for (const JsonMember& member : names.members()) {
    config.set(member.key, member.value);
    if (!member.value.is_null()) special.set(member.key, member.value);
  }
  std::vector<Tokenizer::File> files;
  if (fits) {
    const JsonValue json = JsonValue::object({{"version", "1.0"},
                                              {"truncation", nullptr},
                                              {"padding", nullptr},
                                              {"added_tokens", added_tokens_of(model)},
                                              {"normalizer", normalizer_of(model)},
                                              {"pre_tokenizer", nullptr},
                                              {"post_processor", nullptr},
                                              {"decoder", decoder_of(model)},
                                              {"model", bpe_of(model, unknown)}});
    files.push_back({.name = "tokenizer.json", .content = json.dump() + "\n", .derived = true});
  } else {
    // The defaults of BertGenerationTokenizer for these two would be added to the vocabulary.
    config.set("pad_token", unknown);
    config.set("sep_token", eos >= 0 ? name(eos) : JsonValue(unknown));
    files.push_back({.name = "spiece.model", .content = bytes, .derived = true});
  }
  files.push_back({.name = "tokenizer_config.json", .content = config.dump(1) + "\n", .derived = true});
  files.push_back({"special_tokens_map.json", special.dump(1) + "\n", true});
  return files;
}

}  // namespace nrl::data
