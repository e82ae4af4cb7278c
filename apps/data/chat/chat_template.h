#pragma once
// Chat templates: the Jinja subset in which tokenizers describe the text of a conversation.

#include <cstddef>
#include <cstdint>
#include <ctime>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/io/json.h"

namespace nrl::data {

/// Bytes [begin, end) of a text.
struct Region {
  size_t begin = 0, end = 0;
  bool operator==(const Region&) const = default;
};

/// One conversation. `messages` is an array of objects; `tools` is an array, or null if there are none;
/// `kwargs` is an object of variables for the template (`chat_template_kwargs`), or null.
struct Conversation {
  JsonValue messages;
  JsonValue tools;
  JsonValue kwargs;
};

struct RenderOptions {
  /// Sets the template's variable of this name: the text ends with the beginning of an assistant turn.
  bool add_generation_prompt = false;
  /// Ends the text with the content of the last message, so that a model continues it. Excludes
  /// `add_generation_prompt`.
  bool continue_final_message = false;
  /// Variables of every conversation, such as bos_token: an object, or null. `kwargs` of a conversation
  /// take precedence.
  JsonValue special_tokens;
  /// Renders only this many messages, from the first on.
  size_t most_messages = SIZE_MAX;
  /// The time of strftime_now(); the local time of the call if absent.
  std::optional<std::tm> now;
};

/// A rendered conversation. Offsets are bytes of `text`.
struct Rendered {
  std::string text;
  /// For each message, the text emitted by loops over it, from its first to its last byte; empty for a
  /// message that no loop visits or whose loops emit nothing.
  std::vector<Region> messages;
  /// The {% generation %} blocks, in order.
  std::vector<Region> generation;
};

/// A parsed template, which renders as transformers' apply_chat_template does. Copies share the parsed form.
class ChatTemplate {
 public:
  /// Parses `source`, valid UTF-8. Error (Exit::data) "NAME:line:column: ..." for a syntax error or a
  /// statement, filter, test or method that is not supported.
  static ChatTemplate parse(std::string source, std::string name);

  /// Renders a conversation; may be called from several threads at once. Error (Exit::data): the text given
  /// to raise_exception() as it is, or "NAME:line:column: ..." for another error of the template, a text over
  /// 64 MiB, more than 10^7 evaluation steps, or nesting that is too deep.
  Rendered render(const Conversation& conversation, const RenderOptions& options) const;

  const std::string& name() const;
  /// True if the template marks assistant text by {% generation %} blocks.
  bool has_generation_blocks() const;

  struct Program;  ///< the parsed form, private to this directory

 private:
  explicit ChatTemplate(std::shared_ptr<const Program> program) : program_(std::move(program)) {}
  std::shared_ptr<const Program> program_;
};

/// The text of a built-in template: "chatml", "llama3" or "zephyr"; null for another name.
const char* builtin_chat_template(std::string_view name);

}  // namespace nrl::data
