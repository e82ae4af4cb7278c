#pragma once
// Lengths and counts of examples.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/io/json.h"

namespace nrl::data {

struct SequenceLength {
  int32_t tokens = 0;
  int32_t loss_tokens = 0;  ///< targets: tokens from the second on that are predicted with loss
};

/// A number of records, and the first of them.
struct RecordIncidents {
  static constexpr size_t max_places = 5;
  struct Place {
    int32_t file = 0;  ///< index of the input file
    int64_t line = 0;
    std::string text;  ///< of an error; empty: none is needed
  };
  int64_t count = 0;
  std::vector<Place> places;

  void add(Place place);
  void add(const RecordIncidents& other);
};

struct ExampleCounts {
  int64_t records = 0;   ///< read, used or not
  int64_t examples = 0;  ///< made of them
  int64_t sequences = 0, tokens = 0, loss_tokens = 0;
  int64_t text_bytes = 0;           ///< tokenized, after rendering
  int64_t bytes_without_token = 0;  ///< skipped: the tokenizer has no token for them

  // Examples.
  RecordIncidents truncated;
  RecordIncidents end_lost;      ///< truncated, so that the last end token is missing
  RecordIncidents no_end_token;  ///< a turn or text is not followed by an end token, which would be trained
  RecordIncidents special_text;  ///< the record's text contains the text of a special token
  int64_t duplicates = 0;        ///< with the same tokens and masks as another one

  // Records of which no example was made.
  RecordIncidents dropped;          ///< too long
  RecordIncidents special_dropped;  ///< special tokens in the text
  RecordIncidents without_loss;     ///< no token is predicted with loss
  RecordIncidents skipped;          ///< bad, with OnBadRecord::skip
};

/// Adds all counts of `part`.
void add_counts(ExampleCounts& sum, const ExampleCounts& part);
JsonValue counts_to_json(const ExampleCounts& counts);
/// Throws Error (`data`).
ExampleCounts counts_from_json(const JsonValue& value);

}  // namespace nrl::data
