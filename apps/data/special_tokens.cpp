#include "apps/data/special_tokens.h"

namespace nrl::data {

SpecialTokenFinder::SpecialTokenFinder(const Tokenizer& tokenizer) {
  for (const auto& [text, id] : tokenizer.special_token_list()) {
    if (text.empty()) continue;
    texts_.push_back(text);
    tokens_.add({text, id});
  }
}

std::optional<SpecialTokenFinder::Match> SpecialTokenFinder::find(std::string_view text, size_t from) const {
  for (size_t at = tokens_.next_first(text, from); at < text.size(); at = tokens_.next_first(text, at + 1))
    if (const AddedToken* const token = tokens_.match(text.substr(at)))
      return Match{at, at + token->content.size(), token->id};
  return std::nullopt;
}

int64_t SpecialTokenFinder::count(std::string_view text) const {
  int64_t matches = 0;
  for (auto match = find(text); match; match = find(text, match->end)) ++matches;
  return matches;
}

}  // namespace nrl::data
