#pragma once
// How records become training examples.

#include <cstdint>
#include <string>
#include <vector>

#include "core/config/example_enums.h"
#include "core/io/json.h"

namespace nrl::data {

/// Everything that examples depend on, besides the tokenizer. Fields without an effect in a format are
/// refused where they differ from their default.
struct ExampleOptions {
  std::vector<std::string> inputs;  ///< JSON lines, text files or directories, see list_inputs()
  ExampleFormat format = ExampleFormat::automatic;

  // Keys of a record.
  std::string text_key = "text";
  std::string chat_key;  ///< the messages; empty: "messages" or "conversations"
  std::string tools_key = "tools";
  std::string input_key = "prompt";  ///< of an instruction
  std::string output_key = "completion";
  std::string prompt_key = "prompt";  ///< of a preference
  std::string chosen_key = "chosen";
  std::string rejected_key = "rejected";

  std::string system_prompt_file;  ///< instruction: text of a system message before the prompt
  std::string prompt_file;  ///< instruction: text in which {} stands for the prompt ({{ and }} for braces)

  /// "default": the tokenizer's, none if it has none; "none"; the name of one of the tokenizer's templates or
  /// of a built-in one; a file; or the text of a template.
  std::string chat_template = "default";
  JsonValue chat_template_kwargs;  ///< variables of all records, or null; a record may replace them
  std::string template_date;       ///< date that the template may print, YYYY-MM-DD; empty: today

  bool add_bos = false;  ///< without a template: begin with the tokenizer's beginning token
  bool add_eos = true;   ///< without a template: end with the tokenizer's end token

  TrainOn train_on = TrainOn::automatic;
  int64_t max_length = 0;  ///< most tokens of a sequence; must be set
  OnOverlong on_overlong = OnOverlong::truncate;
  SpecialTokensInText special_tokens_in_text = SpecialTokensInText::allow;
  OnBadRecord on_bad_record = OnBadRecord::error;
  int64_t vocab_size = 0;  ///< of the model: larger ids are refused; 0: the tokenizer's

  std::string cache_dir;  ///< where the tokens are stored; empty: beside the first input
};

}  // namespace nrl::data
