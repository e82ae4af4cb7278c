#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "apps/data/chat/ast.h"
#include "apps/data/chat/chat_template.h"
#include "apps/data/chat/machine.h"
#include "apps/data/chat/parser.h"
#include "apps/data/chat/print.h"
#include "apps/data/chat/text.h"
#include "apps/data/unicode.h"
#include "core/base/error.h"

namespace nrl::data {
namespace {

using chat::Dict;
using chat::Entry;
using chat::Kind;
using chat::List;
using chat::Machine;
using chat::Value;

/// The text that transformers appends to the last message to find its end in the rendered text.
constexpr std::string_view end_mark = "CONTINUE_FINAL_MESSAGE_TAG ";

/// Names of the field for the reasoning of a message, the standard one first.
constexpr std::array<std::string_view, 3> reasoning_fields = {"reasoning_content", "thinking", "reasoning"};

/// Values that refer to the texts of `json`.
Value value_of(chat::Arena& arena, const JsonValue& json) {
  if (json.is_string()) return Value::of(std::string_view(json.as_string()));
  if (json.is_null()) return Value();
  if (json.is_bool()) return Value::of(json.as_bool());
  if (json.is_integer()) return Value::of(json.as_int());
  if (json.is_number()) return Value::of(json.as_double());
  if (json.is_array()) {
    Value* const items = arena.array<Value>(json.items().size());
    size_t count = 0;
    for (const JsonValue& item : json.items()) new (items + count++) Value(value_of(arena, item));
    return Value::of(arena.make(List{items, count}));
  }
  const JsonObject& members = json.members();
  auto* const entries = arena.array<Entry>(members.size());
  size_t count = 0;
  for (const JsonMember& member : members)
    new (entries + count++) Entry{Value::of(std::string_view(member.key)), value_of(arena, member.value)};
  return Value::of(static_cast<const Dict*>(arena.make(Dict{entries, count})));
}

/// A message without its members that are null, its reasoning under the names that templates read.
Dict* message_of(chat::Arena& arena, const JsonValue& json, size_t index) {
  if (!json.is_object())
    fail(Exit::data, "{}message {} is {}; expected an object", json.where(), index + 1, json.kind());
  const JsonValue* reasoning = nullptr;
  for (const std::string_view name : reasoning_fields) {
    const JsonValue* const field = json.find(name);
    if (!reasoning && field && !field->is_null()) reasoning = field;
  }
  const JsonObject& members = json.members();
  auto* const entries = arena.array<Entry>(members.size() + 2);
  size_t count = 0;
  const auto is_given = [&](std::string_view name) {
    const JsonValue* const field = json.find(name);
    return field && !field->is_null();
  };
  const auto add = [&](std::string_view name, const Value& value) {
    new (entries + count++) Entry{Value::of(name), value};
  };
  const Value copy = reasoning ? value_of(arena, *reasoning) : Value();
  if (reasoning) add("thinking", is_given("thinking") ? value_of(arena, *json.find("thinking")) : copy);
  for (const JsonMember& member : members) {
    if (member.value.is_null() || (reasoning && member.key == "thinking")) continue;
    add(member.key, reasoning && member.key == "reasoning_content" ? copy : value_of(arena, member.value));
  }
  if (reasoning && !is_given("reasoning_content")) add("reasoning_content", copy);
  return arena.make(Dict{entries, count, static_cast<int64_t>(index)});
}

/// Appends the mark to the content of the last message; returns the content.
std::string_view mark_end(Machine& machine, const Dict& message) {
  constexpr std::string_view wanted = "content";
  Value* content = nullptr;
  for (size_t i = 0; i < message.size; ++i)
    if (message.entries[i].key.text() == wanted) content = const_cast<Value*>(&message.entries[i].value);
  if (!content)
    fail(Exit::data, "continue_final_message is set but the final message has no \"content\" to continue!");
  if (content->is(Kind::list)) {
    // The last part with a text.
    Value* text = nullptr;
    for (size_t i = 0; i < content->list->size; ++i) {
      const Value& part = content->list->items[i];
      for (size_t k = 0; part.is(Kind::dict) && k < part.dict->size; ++k)
        if (part.dict->entries[k].key.text() == "text")
          text = const_cast<Value*>(&part.dict->entries[k].value);
    }
    if (!text)
      fail(Exit::data,
           "continue_final_message is set but we could not find any text to continue in the final message!");
    content = text;
  }
  if (!content->is(Kind::string))
    fail(Exit::data, "continue_final_message is set but the content of the final message is not a string");
  const std::string_view text = content->text();
  *content = machine.text(std::string(text).append(end_mark));
  return text;
}

/// Cuts the rendered text at the mark, like transformers.
void cut_at_mark(std::string_view content, Rendered& rendered) {
  using chat::Side;
  const std::string_view mark = chat::strip(end_mark, Side::both);
  std::string& text = rendered.text;
  const size_t at = text.rfind(mark);
  if (at == std::string::npos || text.find(chat::strip(content, Side::both)) == std::string::npos)
    fail(Exit::data,
         "continue_final_message is set but the final message does not appear in the chat after applying the "
         "chat "
         "template! This can happen if the chat template deletes portions of the final message. Please "
         "verify the "
         "chat template and final message in your chat to ensure they are compatible.");
  const bool keeps_spaces = std::string_view(text).substr(at).starts_with(end_mark);
  text.resize(at);
  if (!keeps_spaces) text.resize(chat::strip(text, Side::right).size());
  const auto cut = [&](Region& region) {
    region.begin = std::min(region.begin, text.size());
    region.end = std::min(region.end, text.size());
  };
  for (Region& region : rendered.messages) cut(region);
  for (Region& region : rendered.generation) cut(region);
}

void define_all(Machine& machine, const JsonValue& variables, std::string_view what) {
  if (variables.is_null()) return;
  if (!variables.is_object())
    fail(Exit::data, "{}{}: {}; expected an object", variables.where(), what, variables.kind());
  for (const JsonMember& member : variables.members())
    machine.define(member.key, value_of(machine.arena, member.value));
}

}  // namespace

ChatTemplate ChatTemplate::parse(std::string source, std::string name) {
  require_utf8(source);
  return ChatTemplate(chat::parse_template(std::move(source), std::move(name)));
}

const std::string& ChatTemplate::name() const {
  return program_->name;
}

bool ChatTemplate::has_generation_blocks() const {
  return program_->has_generation;
}

Rendered ChatTemplate::render(const Conversation& conversation, const RenderOptions& options) const {
  if (options.add_generation_prompt && options.continue_final_message)
    fail(Exit::data, "continue_final_message and add_generation_prompt exclude each other");
  const JsonValue::Array& all = conversation.messages.items();
  const std::span messages(all.data(), std::min(all.size(), options.most_messages));
  if (messages.empty()) fail(Exit::data, "{}the conversation has no messages", conversation.messages.where());
  Rendered rendered;
  rendered.messages.resize(messages.size());
  Machine machine(*program_, options.now ? &*options.now : nullptr, rendered);
  Value* const values = machine.arena.array<Value>(messages.size());
  const Dict* last = nullptr;
  for (size_t i = 0; i < messages.size(); ++i)
    new (values + i) Value(Value::of(last = message_of(machine.arena, messages[i], i)));
  const std::string_view content =
      options.continue_final_message ? mark_end(machine, *last) : std::string_view();
  define_all(machine, options.special_tokens, "special tokens");
  define_all(machine, conversation.kwargs, "chat_template_kwargs");
  if (!conversation.kwargs.is_object() || !conversation.kwargs.contains("documents"))
    machine.define("documents", Value());
  machine.define("messages", Value::of(machine.arena.make(List{values, messages.size()})));
  machine.define("tools", value_of(machine.arena, conversation.tools));
  machine.define("add_generation_prompt", Value::of(options.add_generation_prompt));
  machine.run();
  if (options.continue_final_message) cut_at_mark(content, rendered);
  return rendered;
}

}  // namespace nrl::data
