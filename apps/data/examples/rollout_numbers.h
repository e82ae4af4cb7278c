#pragma once
// Reads the token ids and numbers in records of rollouts.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "apps/data/examples/example_numbers.h"
#include "core/io/json.h"

namespace nrl::data {

/// The most ids of a teacher per token.
inline constexpr int32_t most_top_k = 1 << 14;

/// Token ids under `key` of a record, which must have it: at least one, each from 0 to 2^31 - 1. Throws Error
/// (`data`) with the place in the line.
std::vector<int32_t> read_ids(const JsonValue& record, std::string_view key);

/// Reads the fields reward, advantage, logprobs, old_logprobs, group, topk_ids and topk_logprobs, and returns
/// which of them the record has. Arrays of tokens may have any length, topk_ids and topk_logprobs the same.
/// Throws Error (`data`) with the place in the line: a number that is not finite (of tokens: as a float), a
/// log-probability above 0, tokens with different numbers of ids or twice the same id.
ExampleColumns read_rollout_numbers(const JsonValue& record, ExampleNumbers& numbers);

/// Throws Error (`data`) unless the arrays of tokens have as many elements as the completion has tokens;
/// `of_text`: these were made of its text.
void require_tokens(const ExampleColumns& columns, const ExampleNumbers& numbers, int64_t tokens,
                    bool of_text);

/// The columns of the first record that can be read, which all others must have.
struct ExpectedColumns {
  ExampleColumns columns;
  std::string where = {};  ///< "FILE:line" of that record
};
/// Throws Error (`data`) naming a field that differs.
void require_columns(const ExampleColumns& columns, const ExpectedColumns& expected);

}  // namespace nrl::data
