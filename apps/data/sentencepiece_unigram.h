#pragma once
// Encodes sentencepiece unigram models: the pieces with the largest sum of scores.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "apps/data/sentencepiece_model.h"
#include "apps/data/sentencepiece_normalizer.h"

namespace nrl::data {

/// The pieces that begin at a position of a text, found byte by byte: a trie as a double array.
class PieceTrie {
 public:
  static constexpr size_t max_pieces = (size_t{1} << 23) - 2;

  struct Entry {
    std::string_view text;
    int32_t id;
  };
  /// The texts must be different and not empty.
  explicit PieceTrie(std::vector<Entry> entries);

  /// Calls found(id, bytes) for every piece that `text` begins with, shortest first.
  template <class Found>
  void each_prefix(std::string_view text, Found&& found) const {
    uint32_t base = cells_[0].base;
    for (size_t i = 0; i < text.size(); ++i) {
      const auto byte = static_cast<uint8_t>(text[i]);
      const Cell cell = cells_[base + byte];
      if ((cell.id_and_label & label_mask) != byte + 1u) return;
      if (const uint32_t id = cell.id_and_label >> label_bits; id != 0)
        found(static_cast<int32_t>(id) - 1, i + 1);
      base = cell.base;
    }
  }

 private:
  static constexpr uint32_t label_bits = 9, label_mask = (1u << label_bits) - 1;

  // Children of a node are at base + byte. No two nodes have the same base, so that the label suffices to
  // tell a child from a cell of another node.
  struct Cell {
    uint32_t base = 0;
    uint32_t id_and_label = 0;  // id + 1, or 0; byte + 1, or 0 if the cell is free
  };
  std::vector<Cell> cells_;
};

/// The same ids as the sentencepiece library, ties and rounding of sums included, but several times faster.
/// Immutable; any number of threads may encode.
class SentencePieceUnigram {
 public:
  /// Why a model is not supported; empty if it is.
  static std::string unsupported_reason(const SentencePieceModel& model);

  /// `model` must be supported.
  explicit SentencePieceUnigram(const SentencePieceModel& model);

  /// Appends the ids of valid UTF-8, and the ends of the tokens in `text` if `ends` is not null.
  void encode(std::string_view text, std::vector<int32_t>& out, std::vector<int64_t>* ends = nullptr) const;

 private:
  SentencePieceNormalizer normalizer_;
  PieceTrie trie_;
  std::vector<double> scores_;  // by id
  float unknown_score_ = 0;
  int32_t unknown_ = 0;
  std::vector<int32_t> byte_ids_;  // with byte fallback: 256
};

}  // namespace nrl::data
