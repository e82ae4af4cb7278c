#include <algorithm>

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include "apps/data/sentencepiece_bpe.h"
#include "apps/data/sentencepiece_unigram.h"
#include "apps/data/tokenizer.h"
#include "apps/data/tokenizer_traits.h"
#include "apps/data/unicode.h"
#include "core/base/error.h"
#include "core/base/text.h"
#include "core/io/atomic_file.h"

namespace nrl::data {
namespace {

constexpr uint64_t max_model_bytes = 64ull << 20;

class SentencePieceTokenizer final : public Tokenizer {
 public:
  SentencePieceTokenizer(std::string model, const std::string& path, TokenizerTraits traits)
      : Tokenizer(std::move(traits)), model_(std::move(model)) {
    const auto status = processor_.LoadFromSerializedProto(model_);
    if (!status.ok() || processor_.GetPieceSize() <= 0)
      fail(Exit::data, "{}: not a sentencepiece model: {}", path,
           status.ok() ? "it has no pieces" : status.message());
    const auto parsed = SentencePieceModel::parse(model_);
    if (!parsed || static_cast<int>(parsed->pieces.size()) != processor_.GetPieceSize())
      fail(Exit::data, "{}: not a sentencepiece model: its pieces cannot be read", path);
    fields_ = *parsed;
    if (fields_.algorithm == SentencePieceModel::Algorithm::bpe) {
      slow_reason_ = SentencePieceBpe::unsupported_reason(fields_);
      if (slow_reason_.empty()) bpe_ = std::make_unique<SentencePieceBpe>(fields_);
    } else {
      slow_reason_ = SentencePieceUnigram::unsupported_reason(fields_);
      if (slow_reason_.empty()) unigram_ = std::make_unique<SentencePieceUnigram>(fields_);
    }
    if (traits_.named) return;
    const auto name = [&](const char* key, int id) {
      if (id >= 0) traits_.special_tokens[key] = processor_.IdToPiece(id);
    };
    name("bos_token", processor_.bos_id());
    name("eos_token", processor_.eos_id());
    name("unk_token", processor_.unk_id());
  }

  int64_t encode(std::string_view text, std::vector<int32_t>& out) const override {
    require_utf8(text);
    if (bpe_ || unigram_) {
      bpe_ ? bpe_->encode(text, out) : unigram_->encode(text, out);
      return 0;
    }
    std::vector<int> ids;
    if (const auto status = processor_.Encode(text, &ids); !status.ok())
      fail(Exit::data, "sentencepiece cannot encode the text: {}", status.message());
    out.insert(out.end(), ids.begin(), ids.end());
    return 0;
  }

  int64_t encode_spans(std::string_view text, std::vector<int32_t>& ids,
                       std::vector<int64_t>& ends) const override {
    require_utf8(text);
    if (bpe_ || unigram_) {
      bpe_ ? bpe_->encode(text, ids, &ends) : unigram_->encode(text, ids, &ends);
      return 0;
    }
    const auto pieces = sentencepiece_spans(processor_.EncodeAsSerializedProto(text));
    if (!pieces) fail(Exit::internal, "the spans of sentencepiece cannot be read");
    // The library gives all bytes of a character to the last one of its byte pieces; here each has one.
    int64_t end = 0, library_end = 0;
    for (const SentencePieceSpan& piece : *pieces) {
      ids.push_back(piece.id);
      end = processor_.IsByte(piece.id) && piece.end == library_end ? end + 1 : piece.end;
      library_end = piece.end;
      ends.push_back(end);
    }
    // Normalization may have made a character longer than it is in the text.
    for (size_t i = ends.size(), first = i - pieces->size(); i-- > first + 1;)
      ends[i - 1] = std::min(ends[i - 1], ends[i]);
    return 0;
  }

  std::string decode(std::span<const int32_t> ids) const override {
    for (const int32_t id : ids)
      if (id < 0 || id >= vocab_size())
        fail(Exit::data, "token {} is not in the vocabulary of {}", id, vocab_size());
    // The library decodes an incomplete UTF-8 sequence as U+FFFD. At the end of the ids the missing bytes may
    // still follow, so the bytes are returned unchanged.
    std::string tail;  // bytes of the byte tokens at the end
    while (tail.size() < std::min<size_t>(3, ids.size())) {
      const int32_t id = ids[ids.size() - 1 - tail.size()];
      if (!processor_.IsByte(id)) break;
      tail.insert(0, 1, static_cast<char>(std::stoi(processor_.IdToPiece(id).substr(3, 2), nullptr, 16)));
    }
    const std::string incomplete = tail.substr(complete_utf8(tail));
    const std::vector<int> complete(ids.begin(), ids.end() - static_cast<std::ptrdiff_t>(incomplete.size()));
    std::string text;
    if (const auto status = processor_.Decode(complete, &text); !status.ok())
      fail(Exit::data, "sentencepiece cannot decode the tokens: {}", status.message());
    return text + incomplete;
  }

  int64_t vocab_size() const override { return processor_.GetPieceSize(); }
  std::optional<int32_t> bos() const override { return valid(processor_.bos_id()); }
  std::optional<int32_t> eos() const override { return valid(processor_.eos_id()); }
  std::optional<int32_t> id_of(std::string_view token) const override {
    const int id = processor_.PieceToId(token);  // of the unknown piece if there is no such piece
    return processor_.IdToPiece(id) == token ? std::optional<int32_t>(id) : std::nullopt;
  }
  std::vector<SpecialToken> special_token_list() const override {
    using Type = SentencePieceModel::PieceType;
    const std::vector<int32_t> ends = eos_ids();
    std::vector<SpecialToken> list;
    for (size_t i = 0; i < fields_.pieces.size(); ++i) {
      const auto& [text, score, type] = fields_.pieces[i];
      const auto id = static_cast<int32_t>(i);
      if (type == Type::control || type == Type::unknown || std::binary_search(ends.begin(), ends.end(), id))
        list.push_back({text, id});
    }
    return list;
  }
  std::string_view kind() const override { return "sentencepiece"; }
  std::string slow_reason() const override { return slow_reason_; }
  std::vector<File> files() const override {
    std::vector<File> all;
    // Derived files could contradict a tokenizer_config.json of another program.
    const bool foreign = std::any_of(traits_.files.begin(), traits_.files.end(),
                                     [](const File& file) { return file.name == "tokenizer_config.json"; }) &&
                         traits_.derived_from.empty();
    if (!foreign) all = sentencepiece_companions(fields_, model_, bos().value_or(-1), eos().value_or(-1));
    all.insert(all.begin(), {"tokenizer.model", model_});
    carry(traits_.files, all);
    return all;
  }

 private:
  static std::optional<int32_t> valid(int id) { return id >= 0 ? std::optional<int32_t>(id) : std::nullopt; }

  std::string model_;
  SentencePieceModel fields_;
  std::string slow_reason_;
  // At most one of them supports the model; the library encodes if neither does.
  std::unique_ptr<SentencePieceBpe> bpe_;
  std::unique_ptr<SentencePieceUnigram> unigram_;
  sentencepiece::SentencePieceProcessor processor_;
};

class Lines final : public sentencepiece::SentenceIterator {
 public:
  explicit Lines(const std::vector<std::string>& lines) : lines_(lines) {}
  bool done() const override { return at_ >= lines_.size(); }
  void Next() override { ++at_; }
  const std::string& value() const override { return lines_[at_]; }
  sentencepiece::util::Status status() const override { return {}; }

 private:
  const std::vector<std::string>& lines_;
  size_t at_ = 0;
};

}  // namespace

std::unique_ptr<Tokenizer> load_sentencepiece(const std::string& path) {
  // Beside DIRECTORY/tokenizer.model are DIRECTORY/tokenizer_config.json and so on, beside PREFIX.model the
  // files PREFIX.tokenizer_config.json and so on.
  const bool directory = path == "tokenizer.model" || path.ends_with("/tokenizer.model");
  const std::string_view suffix = directory ? "tokenizer.model" : "model";
  TokenizerTraits traits;
  if (directory || path.ends_with(".model"))
    traits = read_tokenizer_traits(path.substr(0, path.size() - suffix.size()));
  return std::make_unique<SentencePieceTokenizer>(read_file(path, max_model_bytes), path, std::move(traits));
}

std::unique_ptr<Tokenizer> make_sentencepiece(std::string model, const std::string& name) {
  return std::make_unique<SentencePieceTokenizer>(std::move(model), name, TokenizerTraits());
}

std::string train_sentencepiece(const std::vector<std::string>& lines, int64_t size, int threads) {
  constexpr int64_t min_size = 256 + 3 + 1;  // bytes, unknown, begin, end, and one piece
  if (size < min_size || size > 1 << 20)
    fail(Exit::usage, "train-sentencepiece:{}: the size must be between {} and {}", size, min_size, 1 << 20);
  if (std::all_of(lines.begin(), lines.end(), [](const std::string& line) { return line.empty(); }))
    fail(Exit::data, "train-sentencepiece: the input has no text to train on");
  size_t longest = 0;
  for (const std::string& line : lines) longest = std::max(longest, line.size());
  // Identity normalization, no dummy prefix and byte fallback ensure decode(encode(text)) == text.
  const std::unordered_map<std::string, std::string> options = {
      {"model_type", "bpe"},
      {"vocab_size", std::to_string(size)},
      {"hard_vocab_limit", "false"},
      {"character_coverage", "0.9995"},
      {"byte_fallback", "true"},
      {"normalization_rule_name", "identity"},
      {"remove_extra_whitespaces", "false"},
      {"add_dummy_prefix", "false"},
      {"split_digits", "true"},
      {"allow_whitespace_only_pieces", "true"},
      {"max_sentence_length", std::to_string(std::max<size_t>(longest + 1, 10))},
      {"num_threads", std::to_string(std::clamp(threads, 1, 128))},
      {"minloglevel", "2"}};
  Lines iterator(lines);
  std::string model;
  const auto status = sentencepiece::SentencePieceTrainer::Train(options, &iterator, &model);
  if (!status.ok()) fail(Exit::data, "train-sentencepiece:{}: {}", size, status.message());
  return model;
}

}  // namespace nrl::data
