#include "apps/data/chat/chat_prompt.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "apps/data/chat/text.h"
#include "apps/data/unicode.h"
#include "core/base/error.h"

namespace nrl::data {

Prompt text_prompt(std::string_view text, const Tokenizer& tokenizer) {
  Prompt prompt{.ids = tokenizer.encode(text), .end_ids = {}, .end_text = {}};
  if (prompt.ids.empty() && tokenizer.bos()) prompt.ids.push_back(*tokenizer.bos());
  if (prompt.ids.empty() && tokenizer.eos()) prompt.ids.push_back(*tokenizer.eos());
  if (prompt.ids.empty())
    fail(Exit::usage,
         "the prompt has no tokens, and the tokenizer has no beginning-of-text token. Fix: give a longer "
         "prompt");
  if (tokenizer.eos()) prompt.end_ids.push_back(*tokenizer.eos());
  return prompt;
}

JsonValue chat_message(std::string_view role, std::string content) {
  require_utf8(content);
  return JsonValue::object({{std::string("role"), role}, {"content", std::move(content)}});
}

ChatPrompts::ChatPrompts(ChatTemplate chat, RenderOptions options, const Tokenizer& tokenizer)
    : chat_(std::move(chat)), options_(std::move(options)), tokenizer_(tokenizer), special_(tokenizer) {
  options_.add_generation_prompt = true;
}

Prompt ChatPrompts::prompt(const JsonValue& messages) const {
  std::string text;
  try {
    text = chat_.render({.messages = messages, .tools = {}, .kwargs = {}}, options_).text;
  } catch (const Error& e) {
    fail(e.code(), "chat template: {}", e.what());
  }
  Prompt prompt{.ids = {}, .end_ids = tokenizer_.eos_ids(), .end_text = {}};
  std::vector<int64_t> ends;
  special_.encode(tokenizer_, text, prompt.ids, ends);
  if (prompt.ids.empty()) fail(Exit::data, "{}: the rendered conversation has no tokens", chat_.name());

  std::string end = after_answer(messages);
  if (const auto token = special_.find(end)) {
    prompt.end_ids.push_back(token->id);
    end.resize(token->begin);
  }
  prompt.end_text = chat::strip(end, chat::Side::both);
  return prompt;
}

// The text after an answer, which ends the turn; empty if the template refuses another message here.
std::string ChatPrompts::after_answer(const JsonValue& messages) const {
  constexpr std::string_view answer = "The-answer-5af1";
  Conversation conversation{.messages = messages, .tools = {}, .kwargs = {}};
  conversation.messages.push_back(chat_message("assistant", std::string(answer)));
  RenderOptions options = options_;
  options.add_generation_prompt = false;
  try {
    const std::string text = chat_.render(conversation, options).text;
    const size_t at = text.rfind(answer);
    return at == std::string::npos ? std::string() : text.substr(at + answer.size());
  } catch (const Error&) {
    return {};
  }
}

}  // namespace nrl::data
