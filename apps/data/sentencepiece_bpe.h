#pragma once
// Encodes sentencepiece BPE models by ranked merges.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "apps/data/added_tokens.h"
#include "apps/data/bpe.h"
#include "apps/data/sentencepiece_model.h"
#include "apps/data/sentencepiece_normalizer.h"

namespace nrl::data {

/// Encodes a sentencepiece BPE model with ranked merges: the same ids as the sentencepiece
/// library, but several times faster. Immutable; any number of threads may encode.
class SentencePieceBpe {
 public:
  /// Why a model is not supported, e.g. "it has unused pieces"; empty if it is.
  static std::string unsupported_reason(const SentencePieceModel& model);

  /// `model` must be supported.
  explicit SentencePieceBpe(const SentencePieceModel& model);

  /// Appends the ids of valid UTF-8, and the ends of the tokens in `text` if `ends` is not null.
  void encode(std::string_view text, std::vector<int32_t>& out, std::vector<int64_t>* ends = nullptr) const;

 private:
  SentencePieceNormalizer normalizer_;
  int32_t unknown_ = 0;
  AddedTokens user_defined_;
  std::unique_ptr<BpeModel> bpe_;
};

/// The merges of a BPE model by rank: every split of a normal piece into two normal pieces. All splits of a
/// piece have the same rank.
std::vector<BpeModel::Merge> sentencepiece_merges(const SentencePieceModel& model);

}  // namespace nrl::data
