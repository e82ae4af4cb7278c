#pragma once
// Records of the formats text, messages, instruction, preference and rollouts.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "apps/data/examples/example_numbers.h"
#include "apps/data/examples/example_options.h"
#include "core/io/json.h"

namespace nrl::data {

inline constexpr uint64_t max_prompt_file_bytes = 1 << 20;

/// The source of one sequence of tokens: messages for a chat template, or, if there are none, plain text.
/// Token ids take the place of the completion, or of both.
struct RecordSequence {
  JsonValue messages;          ///< an array of objects with a role; null for plain text
  size_t prompt_messages = 0;  ///< number of messages before the completion; 0 without one
  std::string prompt, completion;
  std::vector<int32_t> prompt_ids, completion_ids;  ///< empty: none; the former only with the latter
};

struct Record {
  std::vector<RecordSequence> sequences;  ///< one, or two of a preference: the chosen one first
  JsonValue tools;                        ///< an array, or null
  JsonValue kwargs;                       ///< an object, or null
  ExampleColumns columns;
  ExampleNumbers numbers;
};

/// Interprets records of one format. Immutable; any number of threads may use one concurrently.
class RecordReader {
 public:
  /// `format` must be one of records; `with_template`: texts become messages. Reads the prompt files. Throws
  /// Error: `config` for options that do not apply, `no_input`, `data`.
  RecordReader(const ExampleOptions& options, ExampleFormat format, bool with_template);

  /// Takes the record out of a parsed line. Throws Error (`data`) with the place in the line.
  Record read(JsonValue line) const;

  /// Sequences of each record.
  int sequences() const { return format_ == ExampleFormat::preference ? 2 : 1; }

 private:
  Record read_messages(JsonValue& line) const;
  Record read_instruction(JsonValue& line) const;
  Record read_preference(JsonValue& line) const;
  Record read_rollout(JsonValue& line) const;
  RecordSequence with_completion(JsonValue prompt, JsonValue completion, const std::string& prompt_key,
                                 const std::string& completion_key) const;

  const ExampleOptions options_;
  const ExampleFormat format_;
  const bool with_template_;
  std::string system_prompt_;
  bool has_system_prompt_ = false;
  std::vector<std::string> prompt_parts_;  // the text of prompt_file around {}
};

/// The format of a record with these fields, and the fields that show it. Throws Error (`data`) if none fits.
struct DetectedFormat {
  ExampleFormat format;
  std::string fields;
};
DetectedFormat detect_format(const JsonValue& record, const ExampleOptions& options);

}  // namespace nrl::data
