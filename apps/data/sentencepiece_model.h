#pragma once
// The fields of a sentencepiece model file (protocol buffer `ModelProto`) that determine the encoding.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "apps/data/tokenizer.h"

namespace nrl::data {

struct SentencePieceModel {
  enum class PieceType : uint8_t { normal = 1, unknown, control, user_defined, unused, byte };
  enum class Algorithm : uint8_t { unigram = 1, bpe, word, character };
  struct Piece {
    std::string text;
    float score = 0;
    PieceType type = PieceType::normal;
  };
  std::vector<Piece> pieces;  ///< by id
  Algorithm algorithm = Algorithm::unigram;
  bool byte_fallback = false;
  bool whitespace_as_suffix = false;
  std::string charsmap;  ///< rules that rewrite characters, e.g. nmt_nfkc; empty: none
  bool add_dummy_prefix = true;
  bool remove_extra_whitespaces = true;
  bool escape_whitespaces = true;

  /// Parses the bytes of a model file; unset if they are not such a protocol buffer.
  static std::optional<SentencePieceModel> parse(std::string_view bytes);
};

/// A piece of an encoded text.
struct SentencePieceSpan {
  int32_t id = 0;
  int64_t end = 0;  ///< byte offset in the text
};
/// Parses a protocol buffer `SentencePieceText`; unset if it is not one.
std::optional<std::vector<SentencePieceSpan>> sentencepiece_spans(std::string_view bytes);

/// The files, derived from the model, that other programs need beside tokenizer.model to get the same ids:
/// tokenizer.json if it can represent the model, else a configuration with which transformers calls the
/// sentencepiece library. `bos` and `eos` may be -1.
std::vector<Tokenizer::File> sentencepiece_companions(const SentencePieceModel& model,
                                                      const std::string& bytes, int32_t bos, int32_t eos);

}  // namespace nrl::data
