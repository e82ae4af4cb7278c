#pragma once
// The chat template that a configuration or a command names.

#include <optional>
#include <string>
#include <string_view>

#include "apps/data/chat/chat_template.h"
#include "apps/data/tokenizer.h"

namespace nrl::data {

/// A template and its text.
struct ChosenTemplate {
  ChatTemplate chat;
  std::string source;
};

/// The key or option that messages name as the choice of a template.
inline constexpr std::string_view template_key = "policy.tokenizer.chat_template";

/// The template that `choice` (ExampleOptions::chat_template) means; absent for "none", and for "default" if
/// the tokenizer has no template. Throws Error: `config` if it means none, `data` if the template is wrong.
std::optional<ChosenTemplate> choose_chat_template(const std::string& choice, const Tokenizer& tokenizer,
                                                   std::string_view key = template_key);

/// Tells how to set a template, with the built-in ones.
std::string no_template_fix(std::string_view key = template_key);

/// The local date as YYYY-MM-DD.
std::string today();

/// The options to render examples with: the tokenizer's special tokens, and noon of a date, YYYY-MM-DD.
/// Throws Error (`config`) for another text.
RenderOptions render_options(const Tokenizer& tokenizer, const std::string& date);

}  // namespace nrl::data
