#pragma once
// The chat template of a configuration.

#include <optional>
#include <string>

#include "apps/data/chat/chat_template.h"
#include "apps/data/tokenizer.h"

namespace nrl::data {

/// A template and its text.
struct ChosenTemplate {
  ChatTemplate chat;
  std::string source;
};

/// The template that `choice` (ExampleOptions::chat_template) means; absent for "none", and for "default" if
/// the tokenizer has no template. Throws Error: `config` if it means none, `data` if the template is wrong.
std::optional<ChosenTemplate> choose_chat_template(const std::string& choice, const Tokenizer& tokenizer);

/// Tells how to set a template.
std::string no_template_fix();

/// The local date as YYYY-MM-DD.
std::string today();

/// The options to render examples with: the tokenizer's special tokens, and noon of a date, YYYY-MM-DD.
/// Throws Error (`config`) for another text.
RenderOptions render_options(const Tokenizer& tokenizer, const std::string& date);

}  // namespace nrl::data
