#pragma once
// The fields of a sentencepiece model file (protocol buffer `ModelProto`) that determine the encoding.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "apps/data/added_tokens.h"
#include "apps/data/bpe.h"
#include "apps/data/sentencepiece_normalizer.h"
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

/// Encodes a sentencepiece BPE model with ranked merges over words: the same ids as the sentencepiece
/// library, but several times faster. Immutable; any number of threads may encode.
class SentencePieceBpe {
 public:
  /// Why a model is not supported, e.g. "its normalizer rewrites characters"; empty if it is.
  static std::string unsupported_reason(const SentencePieceModel& model);

  /// `model` must be supported.
  explicit SentencePieceBpe(const SentencePieceModel& model);

  /// Appends the ids of valid UTF-8.
  void encode(std::string_view text, std::vector<int32_t>& out) const;

 private:
  SentencePieceNormalizer normalizer_;
  int32_t unknown_ = 0;
  AddedTokens user_defined_;
  std::unique_ptr<BpeModel> bpe_;
};

/// The merges of a BPE model by rank: every split of a normal piece into two normal pieces. All splits of a
/// piece have the same rank.
std::vector<BpeModel::Merge> sentencepiece_merges(const SentencePieceModel& model);

/// The files, derived from the model, that other programs need beside tokenizer.model to get the same ids:
/// tokenizer.json if it can represent the model, else a configuration with which transformers calls the
/// sentencepiece library. `bos` and `eos` may be -1.
std::vector<Tokenizer::File> sentencepiece_companions(const SentencePieceModel& model,
                                                      const std::string& bytes, int32_t bos, int32_t eos);

}  // namespace nrl::data
