#pragma once
// Finds the texts of special tokens in text.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "apps/data/added_tokens.h"
#include "apps/data/tokenizer.h"

namespace nrl::data {

/// Finds the texts of Tokenizer::special_token_list() in text: leftmost first, then longest. Immutable.
class SpecialTokenFinder {
 public:
  explicit SpecialTokenFinder(const Tokenizer& tokenizer);

  struct Match {
    size_t begin = 0, end = 0;  ///< bytes
    int32_t id = 0;
  };
  /// The first match from byte `from` on.
  std::optional<Match> find(std::string_view text, size_t from = 0) const;
  /// Number of matches, which do not overlap.
  int64_t count(std::string_view text) const;

  /// Encodes as encode_spans() of `tokenizer`, the one of the constructor, except that the texts of special
  /// tokens become these tokens with every kind of tokenizer.
  int64_t encode(const Tokenizer& tokenizer, std::string_view text, std::vector<int32_t>& ids,
                 std::vector<int64_t>& ends) const;

  /// The texts that are searched for.
  const std::vector<std::string>& texts() const { return texts_; }

 private:
  std::vector<std::string> texts_;
  AddedTokens tokens_;
};

}  // namespace nrl::data
