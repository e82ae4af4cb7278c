#pragma once
// Prompts that a policy answers while it is trained, with the records that rewards read.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "apps/data/examples/example_options.h"
#include "apps/data/tokenizer.h"
#include "core/io/json.h"

namespace nrl::data {

/// All prompts of some files, in memory. Immutable.
class Prompts {
 public:
  struct Item {
    std::vector<int32_t> ids;  ///< to be continued
    JsonValue record;          ///< as in the file
    std::string where;         ///< "FILE:line"
  };

  /// Records {"prompt": TEXT or MESSAGES, ...}, the key being options.input_key; rendered by the chat
  /// template with the header of an answer, if there is one. A prompt that leaves no room for a token in
  /// options.max_length is left out with OnOverlong::drop, else refused. Throws Error: `config`, `no_input`;
  /// `data` with file and line.
  Prompts(const ExampleOptions& options, const Tokenizer& tokenizer);

  int64_t size() const { return static_cast<int64_t>(items_.size()); }
  const Item& operator[](int64_t i) const { return items_[static_cast<size_t>(i)]; }
  /// An answer ends with one of these tokens.
  const std::vector<int32_t>& end_ids() const { return end_ids_; }
  int64_t longest() const { return longest_; }  ///< tokens
  int64_t dropped() const { return dropped_; }  ///< too long
  std::string describe() const;                 ///< for the log: number, source, lengths

 private:
  std::vector<Item> items_;
  std::vector<int32_t> end_ids_;
  std::string source_;
  int64_t longest_ = 0, dropped_ = 0, tokens_ = 0;
};

}  // namespace nrl::data
