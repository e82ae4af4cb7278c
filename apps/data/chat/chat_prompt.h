#pragma once
// Prompts of conversations: rendered by a chat template, tokenized, with the end of the answer.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "apps/data/chat/chat_template.h"
#include "apps/data/special_tokens.h"
#include "apps/data/tokenizer.h"
#include "core/io/json.h"

namespace nrl::data {

/// Token ids for a model to continue, and where the continuation ends.
struct Prompt {
  std::vector<int32_t> ids;
  std::vector<int32_t> end_ids;  ///< the continuation ends before one of these tokens
  std::string end_text;          ///< and before this text; empty: none
};

/// A text to continue up to the tokenizer's end token. An empty text begins with the beginning token, else
/// with the end token. Throws Error: `usage` if the tokenizer has neither, `data` as Tokenizer::encode().
Prompt text_prompt(std::string_view text, const Tokenizer& tokenizer);

/// A message of a conversation. Throws Error (`data`) if the content is not valid UTF-8.
JsonValue chat_message(std::string_view role, std::string content);

/// Renders conversations for answers of the assistant. Immutable.
class ChatPrompts {
 public:
  /// `tokenizer` must outlive this object.
  ChatPrompts(ChatTemplate chat, RenderOptions options, const Tokenizer& tokenizer);

  /// The prompt of a list of messages, with the header of the assistant's turn; the template writes the
  /// beginning token. The answer ends at Tokenizer::eos_ids(), and at the text that the template puts after
  /// an answer: its first special token, or text before that. Throws Error (`data`) with the text that the
  /// template gives to raise_exception(), e.g. for a role that it refuses.
  Prompt prompt(const JsonValue& messages) const;

 private:
  std::string after_answer(const JsonValue& messages) const;

  ChatTemplate chat_;
  RenderOptions options_;
  const Tokenizer& tokenizer_;
  SpecialTokenFinder special_;
};

}  // namespace nrl::data
