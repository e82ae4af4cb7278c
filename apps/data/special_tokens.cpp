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

// Tokenizers of Hugging Face's files find special tokens themselves; for others the text is divided.
int64_t SpecialTokenFinder::encode(const Tokenizer& tokenizer, std::string_view text,
                                   std::vector<int32_t>& ids, std::vector<int64_t>& ends) const {
  if (tokenizer.kind() == "hf") return tokenizer.encode_spans(text, ids, ends);
  int64_t skipped = 0;
  for (size_t at = 0; at < text.size();) {
    const auto match = find(text, at);
    const size_t end = match ? match->begin : text.size(), first = ends.size();
    if (end > at) skipped += tokenizer.encode_spans(text.substr(at, end - at), ids, ends);
    for (size_t i = first; i < ends.size(); ++i) ends[i] += static_cast<int64_t>(at);
    if (!match) break;
    ids.push_back(match->id);
    ends.push_back(static_cast<int64_t>(match->end));
    at = match->end;
  }
  return skipped;
}

}  // namespace nrl::data
