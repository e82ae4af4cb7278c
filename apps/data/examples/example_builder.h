#pragma once
// Makes examples of records: renders, tokenizes and masks them.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "apps/data/chat/chat_template.h"
#include "apps/data/examples/example_cache.h"
#include "apps/data/examples/example_options.h"
#include "apps/data/examples/record.h"
#include "apps/data/examples/rollout_numbers.h"
#include "apps/data/special_tokens.h"
#include "apps/data/text_source.h"
#include "apps/data/tokenizer.h"

namespace nrl::data {

/// Immutable; any number of threads may use one concurrently.
class ExampleBuilder {
 public:
  /// `options.format` and `options.train_on` must not be automatic; `chat`: absent for plain text.
  /// `tokenizer` must outlive the builder. Throws Error: `config`, `no_input`, `data`.
  ExampleBuilder(ExampleOptions options, const Tokenizer& tokenizer, std::optional<ChatTemplate> chat,
                 RenderOptions render);

  /// Appends the examples of all records of a chunk, of the file with this index, to `batch`, whose columns
  /// must be the expected ones. Throws Error (`data`).
  void add(const TextChunk& chunk, int32_t file, const ExpectedColumns& expected, ExampleBatch& batch) const;

  int sequences() const { return reader_.sequences(); }
  /// The columns of the record in a line. Throws Error (`data`).
  ExampleColumns columns(std::string_view line, const std::string& source) const;

 private:
  struct Made;
  void add_record(Record record, RecordIncidents::Place place, const ExpectedColumns& expected,
                  ExampleBatch& batch) const;
  Record read(std::string_view line, const std::string& source) const;
  Conversation conversation_of(RecordSequence& sequence, const Record& record) const;
  void add_beginning(Made& made) const;  // the beginning token, on request
  void check_ids(std::span<const int32_t> ids, std::string_view reason) const;
  void make_ids(RecordSequence& sequence, const Record& record, Made& made) const;
  void make_plain(const RecordSequence& sequence, Made& made) const;
  void make_rendered(RecordSequence& sequence, const Record& record, Made& made) const;
  bool is_end(int32_t id) const;
  std::optional<std::string> plain_text(std::string_view line) const;
  std::string special_text(const Record& record) const;  // of the first special token in it

  const ExampleOptions options_;
  const Tokenizer& tokenizer_;
  const std::optional<ChatTemplate> chat_;
  const RenderOptions render_;
  const RecordReader reader_;
  const SpecialTokenFinder special_;
  const std::vector<int32_t> eos_ids_;
  std::vector<int32_t> end_ids_;  // special tokens, of which each may end a turn
};

}  // namespace nrl::data
