#pragma once
// Examples as a user reads them: their text with the tokens that have a loss, and counts of a set.

#include <cstdint>
#include <string>
#include <vector>

#include "apps/data/examples/example_set.h"
#include "apps/data/tokenizer.h"
#include "core/io/json.h"

namespace nrl::data {

/// Tokens of sequences: the smallest length that at least this share of them does not exceed.
struct LengthSummary {
  int64_t p50 = 0, p90 = 0, max = 0;
};
LengthSummary summarize_lengths(const ExampleSet& set);

/// Consecutive tokens of a sequence that are shown alike.
struct TokenRun {
  std::string text;  ///< as the tokenizer decodes it; of a special token, its name
  bool loss = false, special = false;
  int64_t begin = 0, end = 0;  ///< tokens
};
std::vector<TokenRun> token_runs(const ExampleSet& set, const Tokenizer& tokenizer, int64_t example,
                                 int sequence);

/// `color`: tokens with a loss are green, special tokens inverse; otherwise tokens with a loss are in
/// brackets. A part with a loss that ends without a special token is followed by a red sign, ␃.
struct ShowStyle {
  bool color = false;
  bool ids = false;  ///< also the token ids
};
/// All sequences of an example with its numbers, of log-probabilities the mean; control characters are
/// escaped.
std::string example_text(const ExampleSet& set, const Tokenizer& tokenizer, int64_t example,
                         const ShowStyle& style);
JsonValue example_json(const ExampleSet& set, const Tokenizer& tokenizer, int64_t example);

/// The notes, counts and lengths of a set.
std::string set_text(const ExampleSet& set);
JsonValue set_json(const ExampleSet& set);
/// Facts that a user should know before training, each a sentence with a fix; empty if there are none.
std::vector<std::string> set_warnings(const ExampleSet& set);

}  // namespace nrl::data
