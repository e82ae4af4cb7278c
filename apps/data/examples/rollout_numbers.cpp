#include "apps/data/examples/rollout_numbers.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "core/base/error.h"
#include "core/base/text.h"

namespace nrl::data {
namespace {

// Sums of probabilities that were rounded may exceed 1 by a little.
constexpr double most_log_prob = 0.01;

/// The fields of the columns.
constexpr std::pair<ExampleValue, std::string_view> value_fields[] = {{ExampleValue::reward, "reward"},
                                                                      {ExampleValue::advantage, "advantage"}};
constexpr std::pair<TokenLogProbs, std::string_view> log_prob_fields[] = {
    {TokenLogProbs::sampler, "logprobs"}, {TokenLogProbs::old, "old_logprobs"}};
constexpr std::string_view top_ids_field = "topk_ids", top_log_probs_field = "topk_logprobs";

// The value under a key; null if there is none.
const JsonValue* given(const JsonValue& record, std::string_view key) {
  const JsonValue* value = record.find(key);
  return value && !value->is_null() ? value : nullptr;
}

const JsonValue::Array& list_in(const JsonValue& value, std::string_view key) {
  if (!value.is_array())
    fail(Exit::data, "{}\"{}\" must be a list, not {}", value.where(), key, value.kind());
  return value.items();
}

double finite_number(const JsonValue& value, std::string_view key) {
  if (!value.is_number())
    fail(Exit::data, "{}\"{}\": expected a number, found {}", value.where(), key, value.kind());
  const double number = value.as_double();
  if (!std::isfinite(number)) fail(Exit::data, "{}\"{}\" is not finite", value.where(), key);
  return number;
}

float log_prob_in(const JsonValue& value, std::string_view key) {
  const double number = finite_number(value, key);
  const auto log_prob = static_cast<float>(number);
  if (!std::isfinite(log_prob)) fail(Exit::data, "{}\"{}\": {} is out of range", value.where(), key, number);
  if (number > most_log_prob)
    fail(Exit::data, "{}\"{}\": {} is not the logarithm of a probability; expected at most 0", value.where(),
         key, number);
  return log_prob;
}

int32_t id_in(const JsonValue& value, std::string_view key) {
  if (!value.is_integer())
    fail(Exit::data, "{}\"{}\": expected a token id, found {}", value.where(), key, value.kind());
  const int64_t id = value.as_int();
  if (id < 0 || id > INT32_MAX) fail(Exit::data, "{}\"{}\": {} is no token id", value.where(), key, id);
  return static_cast<int32_t>(id);
}

// The name of a group as JSON.
std::string group_in(const JsonValue& value) {
  if (!value.is_string() && !value.is_number())
    fail(Exit::data, "{}\"group\" must be a string or a number, not {}", value.where(), value.kind());
  if (value.is_number()) (void)finite_number(value, "group");
  return value.dump();
}

// The ids and log-probabilities of one token.
void add_top(const JsonValue& ids, const JsonValue& log_probs, int32_t top_k, ExampleNumbers& numbers) {
  const auto& of_ids = list_in(ids, top_ids_field);
  const auto& of_log_probs = list_in(log_probs, top_log_probs_field);
  for (const auto& [list, value, key] :
       {std::tuple(&of_ids, &ids, top_ids_field), std::tuple(&of_log_probs, &log_probs, top_log_probs_field)})
    if (static_cast<int64_t>(list->size()) != top_k)
      fail(Exit::data, "{}\"{}\" has {} for this token; expected {}, as for the first one", value->where(),
           key, list->size(), top_k);
  for (const JsonValue& id : of_ids) numbers.top_ids.push_back(id_in(id, top_ids_field));
  for (const JsonValue& value : of_log_probs)
    numbers.top_log_probs.push_back(log_prob_in(value, top_log_probs_field));
  std::vector<int32_t> sorted(numbers.top_ids.end() - top_k, numbers.top_ids.end());
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end())
    fail(Exit::data, "{}\"{}\": the id {} is there twice", ids.where(), top_ids_field, *twice);
}

int32_t read_top(const JsonValue& record, ExampleNumbers& numbers) {
  const JsonValue* const ids = given(record, top_ids_field);
  const JsonValue* const log_probs = given(record, top_log_probs_field);
  if (!ids && !log_probs) return 0;
  if (!ids || !log_probs)
    fail(Exit::data, "{}\"{}\" without \"{}\"", record.where(), ids ? top_ids_field : top_log_probs_field,
         ids ? top_log_probs_field : top_ids_field);
  const auto& of_ids = list_in(*ids, top_ids_field);
  const auto& of_log_probs = list_in(*log_probs, top_log_probs_field);
  if (of_ids.size() != of_log_probs.size())
    fail(Exit::data, "{}\"{}\" has {} tokens, \"{}\" has {}", log_probs->where(), top_log_probs_field,
         of_log_probs.size(), top_ids_field, of_ids.size());
  if (of_ids.empty()) fail(Exit::data, "{}\"{}\" is empty", ids->where(), top_ids_field);
  const size_t top_k = list_in(of_ids[0], top_ids_field).size();
  if (top_k < 1 || top_k > static_cast<size_t>(most_top_k))
    fail(Exit::data, "{}\"{}\" has {} ids for a token; expected 1 to {}", of_ids[0].where(), top_ids_field,
         top_k, most_top_k);
  for (size_t i = 0; i < of_ids.size(); ++i)
    add_top(of_ids[i], of_log_probs[i], static_cast<int32_t>(top_k), numbers);
  return static_cast<int32_t>(top_k);
}

}  // namespace

std::vector<int32_t> read_ids(const JsonValue& record, std::string_view key) {
  const JsonValue& value = record.at(key);
  std::vector<int32_t> ids;
  for (const JsonValue& id : list_in(value, key)) ids.push_back(id_in(id, key));
  if (ids.empty()) fail(Exit::data, "{}\"{}\" is empty", value.where(), key);
  return ids;
}

ExampleColumns read_rollout_numbers(const JsonValue& record, ExampleNumbers& numbers) {
  ExampleColumns columns;
  columns.groups = true;
  for (const auto& [value, field] : value_fields) {
    const JsonValue* const number = given(record, field);
    if (!number) continue;
    columns.values[static_cast<size_t>(value)] = true;
    numbers.values[static_cast<size_t>(value)] = finite_number(*number, field);
  }
  for (const auto& [kind, field] : log_prob_fields) {
    const JsonValue* const list = given(record, field);
    if (!list) continue;
    columns.log_probs[static_cast<size_t>(kind)] = true;
    for (const JsonValue& number : list_in(*list, field))
      numbers.log_probs[static_cast<size_t>(kind)].push_back(log_prob_in(number, field));
  }
  if (const JsonValue* const group = given(record, "group")) numbers.group = group_in(*group);
  columns.top_k = read_top(record, numbers);
  return columns;
}

void require_tokens(const ExampleColumns& columns, const ExampleNumbers& numbers, int64_t tokens,
                    bool of_text) {
  const auto require_length = [&](size_t length, std::string_view field) {
    if (static_cast<int64_t>(length) != tokens)
      fail(Exit::data, "\"{}\" is for {}, the completion has {}{}", field,
           counted(static_cast<int64_t>(length), "token"), tokens,
           of_text ? " with its end token. Fix: give \"completion_ids\" instead of a text" : "");
  };
  for (const auto& [kind, field] : log_prob_fields)
    if (columns.has(kind)) require_length(numbers.log_probs[static_cast<size_t>(kind)].size(), field);
  if (columns.top_k > 0)
    require_length(numbers.top_ids.size() / static_cast<size_t>(columns.top_k), top_ids_field);
}

void require_columns(const ExampleColumns& columns, const ExpectedColumns& expected) {
  const auto require_same = [&](bool found, bool first, std::string_view field) {
    if (found == first) return;
    fail(Exit::data, "\"{}\" is {}, {} has {}; expected the same numbers in all records", field,
         found ? "given" : "missing", expected.where, found ? "none" : "it");
  };
  for (const auto& [value, field] : value_fields)
    require_same(columns.has(value), expected.columns.has(value), field);
  for (const auto& [kind, field] : log_prob_fields)
    require_same(columns.has(kind), expected.columns.has(kind), field);
  require_same(columns.top_k > 0, expected.columns.top_k > 0, top_ids_field);
  if (columns.top_k != expected.columns.top_k)
    fail(Exit::data, "\"{}\" has {} for each token, {} has {}; expected the same number in all records",
         top_ids_field, counted(columns.top_k, "id"), expected.where, expected.columns.top_k);
}

}  // namespace nrl::data
