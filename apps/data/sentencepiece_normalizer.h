#pragma once
// The normalizer of a sentencepiece model: rewrites characters and marks spaces.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "apps/data/added_tokens.h"
#include "apps/data/offset_map.h"

namespace nrl::data {

struct SentencePieceModel;

/// Rules that replace the longest matching prefix of a text (`precompiled_charsmap`): a double array, as
/// darts-clone writes it, whose values are offsets of replacements.
class CharacterRules {
 public:
  /// Why the rules cannot be read; empty if they can. No rules are fine.
  static std::string problem(std::string_view charsmap);
  /// `charsmap` must have no problem.
  explicit CharacterRules(std::string_view charsmap);

  bool any() const { return !units_.empty(); }
  /// True if an ASCII character before another one, or at the end, stays as it is.
  bool keeps_ascii(char c) const { return keeps_ascii_[static_cast<uint8_t>(c)]; }
  /// The replacement of the longest prefix that a rule has; `bytes`: its length, 0 if there is none. Throws
  /// Error (`data`) on a damaged rule.
  std::string_view replacement(std::string_view text, size_t& bytes) const;

 private:
  struct Match {
    size_t bytes = 0;
    uint32_t value = 0;
  };
  Match longest(std::string_view text) const;

  std::vector<uint32_t> units_;
  std::string replacements_;  // each ends with NUL
  std::array<bool, 256> keeps_ascii_{};
};

/// Normalizes like the sentencepiece library, for models that mark spaces before words. Immutable.
class SentencePieceNormalizer {
 public:
  /// Why a model is not supported; empty if it is.
  static std::string unsupported_reason(const SentencePieceModel& model);

  /// `model` must be supported.
  explicit SentencePieceNormalizer(const SentencePieceModel& model);

  /// Normalizes valid UTF-8; the result is valid, too. `map`: if not null, receives the parts that change.
  std::string normalize(std::string_view text, OffsetMap* map = nullptr) const;

 private:
  std::string mark_spaces(std::string_view text, OffsetMap* map) const;
  std::string_view next_part(std::string_view text, size_t& bytes) const;

  bool dummy_prefix_, collapse_spaces_;
  CharacterRules rules_;
  AddedTokens user_defined_;  // rules leave them alone
};

}  // namespace nrl::data
