#include "apps/data/examples/record.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <utility>

#include "apps/data/examples/rollout_numbers.h"
#include "core/base/error.h"
#include "core/base/text.h"
#include "core/io/atomic_file.h"

namespace nrl::data {
namespace {

std::string keys_of(const JsonValue& object) {
  std::vector<std::string> keys;
  for (const JsonMember& member : object.members()) keys.push_back(clipped(member.key, 40));
  return keys.empty() ? "no fields" : "the fields " + joined(keys);
}

// Takes a member out of an object; null if it has none.
JsonValue take(JsonValue& object, std::string_view key) {
  JsonValue* value = object.members().find(key);
  return value ? std::move(*value) : JsonValue();
}

bool has(const JsonValue& object, std::string_view key) {
  const JsonValue* value = object.find(key);
  return value && !value->is_null();
}

/// Roles of ShareGPT's "from".
struct Role {
  std::string_view from, role;
};
constexpr Role share_gpt_roles[] = {{"human", "user"},          {"user", "user"},     {"gpt", "assistant"},
                                    {"assistant", "assistant"}, {"system", "system"}, {"tool", "tool"},
                                    {"observation", "tool"}};

// {"from", "value"} to {"role", "content"}.
void convert_share_gpt(JsonValue& message) {
  const JsonValue from = take(message, "from");
  if (!from.is_string())
    fail(Exit::data, "{}\"from\" must be a string, not {}", message.where(), from.kind());
  const auto* known = std::find_if(std::begin(share_gpt_roles), std::end(share_gpt_roles),
                                   [&](const Role& role) { return role.from == from.as_string(); });
  if (known == std::end(share_gpt_roles)) {
    std::vector<std::string_view> names;
    for (const Role& role : share_gpt_roles) names.push_back(role.from);
    fail(Exit::data, "{}\"from\": \"{}\" is no role; expected {}", from.where(), clipped(from.as_string()),
         alternatives(names));
  }
  if (!has(message, "value")) fail(Exit::data, "{}a message without \"value\"", message.where());
  JsonObject converted;
  converted.set("role", known->role);
  converted.set("content", take(message, "value"));
  for (const JsonMember& member : message.members())
    if (member.key != "from" && member.key != "value") converted.set(member.key, member.value);
  message.members() = std::move(converted);
}

bool has_text(const JsonValue& content) {
  if (content.is_string()) return !content.as_string().empty();
  if (!content.is_array()) return false;
  for (const JsonValue& part : content.items())
    if (part.is_object() && !part.get_string("text", "").empty()) return true;
  return false;
}

void check_content(const JsonValue& content) {
  if (content.is_null() || content.is_string()) return;
  if (!content.is_array())
    fail(Exit::data, "{}\"content\" must be a string or a list of text parts, not {}", content.where(),
         content.kind());
  for (const JsonValue& part : content.items()) {
    if (!part.is_object()) fail(Exit::data, "{}a part of \"content\" is {}", part.where(), part.kind());
    if (const std::string type = part.get_string("type", "text"); type != "text")
      fail(Exit::data, "{}a part of type \"{}\"; expected text: other media are not supported", part.where(),
           clipped(type));
    if (!has(part, "text")) fail(Exit::data, "{}a part of \"content\" without \"text\"", part.where());
    (void)part.get_string("text");
  }
}

bool is_assistant(const JsonValue& message) {
  return message.get_string("role") == "assistant";
}

void check_message(const JsonValue& message) {
  if (!has(message, "role"))
    fail(Exit::data, "{}a message without \"role\": it has {}", message.where(), keys_of(message));
  const std::string& role = message.get_string("role");
  if (role.empty()) fail(Exit::data, "{}\"role\" is empty", message.at("role").where());
  const JsonValue* content = message.find("content");
  if (content) check_content(*content);
  const JsonValue* calls = message.find("tool_calls");
  if (calls && !calls->is_null() && !calls->is_array())
    fail(Exit::data, "{}\"tool_calls\" must be a list, not {}", calls->where(), calls->kind());
  if (role != "assistant") {
    if (!content || content->is_null())
      fail(Exit::data, "{}a message of the role \"{}\" without \"content\"", message.where(), clipped(role));
    return;
  }
  constexpr std::array thoughts = {"reasoning_content", "thinking", "reasoning"};
  const bool says = (content && has_text(*content)) ||
                    (calls && calls->is_array() && !calls->items().empty()) ||
                    std::any_of(thoughts.begin(), thoughts.end(), [&](const char* key) {
                      const JsonValue* value = message.find(key);
                      return value && has_text(*value);
                    });
  if (!says)
    fail(Exit::data, "{}an assistant message is empty: it has neither content nor tool_calls",
         message.where());
}

// Checks a list of messages in either spelling, and converts ShareGPT's.
JsonValue checked_messages(JsonValue value, std::string_view key) {
  if (!value.is_array())
    fail(Exit::data, "{}\"{}\" must be a list of messages, not {}", value.where(), key, value.kind());
  for (JsonValue& message : value.items()) {
    if (!message.is_object())
      fail(Exit::data, "{}a message must be an object, not {}", message.where(), message.kind());
    if (!message.contains("role") && message.contains("from")) convert_share_gpt(message);
    check_message(message);
  }
  return value;
}

bool any_assistant(const JsonValue& messages, size_t from) {
  const auto& items = messages.items();
  return std::any_of(items.begin() + static_cast<ptrdiff_t>(from), items.end(), is_assistant);
}

JsonValue message(std::string_view role, JsonValue content) {
  return JsonValue::object({{"role", role}, {"content", std::move(content)}});
}

const std::string& text_in(const JsonValue& value, std::string_view key) {
  if (value.as_string().empty()) fail(Exit::data, "{}\"{}\" is empty", value.where(), key);
  return value.as_string();
}

// The text of a prompt file around its {}; {{ and }} are braces.
std::vector<std::string> split_prompt(const std::string& text, const std::string& path) {
  std::vector<std::string> parts(1);
  for (size_t at = 0; at < text.size(); ++at) {
    const std::string_view two = std::string_view(text).substr(at, 2);
    if (two == "{}") {
      parts.emplace_back();
    } else if (two == "{{" || two == "}}") {
      parts.back() += two[0];
    } else if (text[at] == '{' || text[at] == '}') {
      fail(Exit::data, "{}:{}: a single brace; expected {{}} for the prompt, or {{{{ and }}}} for braces",
           path, 1 + std::count(text.begin(), text.begin() + static_cast<ptrdiff_t>(at), '\n'));
    } else {
      parts.back() += text[at];
      continue;
    }
    ++at;
  }
  if (parts.size() == 1) fail(Exit::data, "{}: no {{}}, which stands for the prompt", path);
  return parts;
}

void require_text_or_messages(const JsonValue& value, std::string_view key, bool with_template) {
  if (!value.is_string() && !value.is_array())
    fail(Exit::data, "{}\"{}\" must be a string or a list of messages, not {}", value.where(), key,
         value.kind());
  if (value.is_array() && !with_template)
    fail(Exit::data,
         "{}\"{}\" is a list of messages, which needs a chat template. Fix: set "
         "policy.tokenizer.chat_template",
         value.where(), key);
}

// Text or messages, whichever a value is, as messages.
JsonValue as_messages(JsonValue value, std::string_view role, std::string_view key) {
  if (value.is_array()) return checked_messages(std::move(value), key);
  (void)text_in(value, key);
  return JsonValue::array({message(role, std::move(value))});
}

// The order of an object's members does not count.
bool same(const JsonValue& a, const JsonValue& b) {
  if (a.is_object() && b.is_object())
    return a.members().size() == b.members().size() &&
           std::all_of(a.members().begin(), a.members().end(), [&](const JsonMember& member) {
             const JsonValue* other = b.find(member.key);
             return other && same(member.value, *other);
           });
  if (a.is_array() && b.is_array()) return std::ranges::equal(a.items(), b.items(), same);
  return a.dump() == b.dump();
}

}  // namespace

RecordReader::RecordReader(const ExampleOptions& options, ExampleFormat format, bool with_template)
    : options_(options), format_(format), with_template_(with_template) {
  NRL_CHECK(format != ExampleFormat::automatic && format != ExampleFormat::tokens);
  const bool instruction = format == ExampleFormat::instruction;
  const bool rollouts = format == ExampleFormat::rollouts;
  if (!instruction && !(options.system_prompt_file.empty() && options.prompt_file.empty()))
    fail(Exit::config, "system_prompt_file and prompt_file apply to the format instruction; the format is {}",
         name_of(format));
  const bool pair = format == ExampleFormat::preference;
  if ((instruction || rollouts) && options.input_key == options.output_key)
    fail(Exit::config, "input_key and output_key are both '{}'", options.input_key);
  if (pair && (options.prompt_key == options.chosen_key || options.prompt_key == options.rejected_key ||
               options.chosen_key == options.rejected_key))
    fail(Exit::config, "prompt_key, chosen_key and rejected_key must differ: '{}', '{}' and '{}'",
         options.prompt_key, options.chosen_key, options.rejected_key);
  if (!options.system_prompt_file.empty()) {
    if (!with_template)
      fail(Exit::config, "system_prompt_file needs a chat template. Fix: set policy.tokenizer.chat_template");
    system_prompt_ = read_file(options.system_prompt_file, max_prompt_file_bytes);
    has_system_prompt_ = true;
  }
  if (!options.prompt_file.empty())
    prompt_parts_ = split_prompt(read_file(options.prompt_file, max_prompt_file_bytes), options.prompt_file);
}

Record RecordReader::read(JsonValue line) const {
  Record record;
  switch (format_) {
    case ExampleFormat::text: {
      if (!has(line, options_.text_key))
        fail(Exit::data, "{}no text under \"{}\": the record has {}", line.where(), options_.text_key,
             keys_of(line));
      RecordSequence sequence;
      sequence.completion = text_in(line.at(options_.text_key), options_.text_key);
      record.sequences.push_back(std::move(sequence));
      return record;
    }
    case ExampleFormat::messages:
      record = read_messages(line);
      break;
    case ExampleFormat::instruction:
      record = read_instruction(line);
      break;
    case ExampleFormat::rollouts:
      record = read_rollout(line);
      break;
    default:
      record = read_preference(line);
  }
  record.tools = take(line, options_.tools_key);
  if (record.tools.is_string()) {  // as JSON in a string, in which columns of tables are typed alike
    const std::string where = record.tools.where();
    try {
      record.tools = parse_json(record.tools.as_string(), options_.tools_key);
    } catch (const Error& e) {
      fail(Exit::data, "{}{}", where, e.what());
    }
  }
  if (!record.tools.is_null() && !record.tools.is_array())
    fail(Exit::data, "{}\"{}\" must be a list, not {}", record.tools.where(), options_.tools_key,
         record.tools.kind());
  if (record.tools.is_array() && record.tools.items().empty()) record.tools = nullptr;
  record.kwargs = take(line, "chat_template_kwargs");
  if (!record.kwargs.is_null() && !record.kwargs.is_object())
    fail(Exit::data, "{}\"chat_template_kwargs\" must be an object, not {}", record.kwargs.where(),
         record.kwargs.kind());
  return record;
}

Record RecordReader::read_messages(JsonValue& line) const {
  std::string key = options_.chat_key;
  if (key.empty()) key = !has(line, "messages") && has(line, "conversations") ? "conversations" : "messages";
  if (!has(line, key))
    fail(Exit::data, "{}no messages under \"{}\": the record has {}. Fix: set data.chat_key", line.where(),
         key, keys_of(line));
  const std::string where = line.at(key).where();
  Record record;
  RecordSequence& sequence = record.sequences.emplace_back();
  sequence.messages = checked_messages(take(line, key), key);
  if (sequence.messages.items().empty()) fail(Exit::data, "{}\"{}\" is empty", where, key);
  if (!any_assistant(sequence.messages, 0))
    fail(Exit::data, "{}no message of the role assistant, on which to train", where);
  return record;
}

RecordSequence RecordReader::with_completion(JsonValue prompt, JsonValue completion,
                                             const std::string& prompt_key,
                                             const std::string& completion_key) const {
  RecordSequence sequence;
  for (const auto& [value, key] : {std::pair(&prompt, &prompt_key), std::pair(&completion, &completion_key)})
    require_text_or_messages(*value, *key, with_template_);
  const bool text_prompt = prompt.is_string();
  if (text_prompt && !prompt_parts_.empty()) {
    std::string text = prompt_parts_[0];
    for (size_t i = 1; i < prompt_parts_.size(); ++i) text += text_in(prompt, prompt_key) + prompt_parts_[i];
    prompt = std::move(text);
  }
  if (!with_template_) {
    sequence.prompt = text_in(prompt, prompt_key);
    sequence.completion = text_in(completion, completion_key);
    return sequence;
  }
  const std::string where = completion.where();
  JsonValue messages = as_messages(std::move(prompt), "user", prompt_key);
  auto& items = messages.items();
  if (has_system_prompt_) {
    if (!items.empty() && items[0].get_string("role") == "system")
      fail(Exit::data, "{}\"{}\" begins with a system message, and system_prompt_file gives another one",
           items[0].where(), prompt_key);
    items.insert(items.begin(), message("system", system_prompt_));
  }
  sequence.prompt_messages = items.size();
  JsonValue answer = as_messages(std::move(completion), "assistant", completion_key);
  std::move(answer.items().begin(), answer.items().end(), std::back_inserter(items));
  if (!any_assistant(messages, sequence.prompt_messages))
    fail(Exit::data, "{}\"{}\" has no message of the role assistant", where, completion_key);
  sequence.messages = std::move(messages);
  return sequence;
}

Record RecordReader::read_instruction(JsonValue& line) const {
  for (const std::string& key : {options_.input_key, options_.output_key})
    if (!has(line, key))
      fail(Exit::data, "{}\"{}\" is missing: the record has {}. Fix: set data.input_key and data.output_key",
           line.where(), key, keys_of(line));
  Record record;
  JsonValue prompt = take(line, options_.input_key);
  record.sequences.push_back(with_completion(std::move(prompt), take(line, options_.output_key),
                                             options_.input_key, options_.output_key));
  return record;
}

namespace {

/// A prompt and its completions, best and worst.
struct Ranked {
  JsonValue prompt, chosen, rejected;
};

// NeMo RL: {"context": [...], "completions": [{"rank": 0, "completion": [...]}, ...]}, the best rank is 0.
Ranked ranked(JsonValue& line) {
  JsonValue completions = take(line, "completions");
  if (!completions.is_array() || completions.items().size() < 2)
    fail(Exit::data, "{}\"completions\" must be a list of at least 2, the rejected one among them",
         completions.where());
  JsonValue *best = nullptr, *worst = nullptr;
  int64_t lowest = 0, highest = 0;
  for (JsonValue& completion : completions.items()) {
    const int64_t rank = completion.get_int("rank");
    if (!best || rank < lowest) {
      best = &completion;
      lowest = rank;
    }
    if (!worst || rank > highest) {
      worst = &completion;
      highest = rank;
    }
  }
  if (lowest == highest)
    fail(Exit::data, "{}all completions have the rank {}: none is preferred", completions.where(), lowest);
  if (!best->contains("completion") || !worst->contains("completion"))
    fail(Exit::data, "{}a completion without \"completion\"", completions.where());
  return {take(line, "context"), take(*best, "completion"), take(*worst, "completion")};
}

// Moves the messages with which both lists begin to the result.
JsonValue common_prompt(JsonValue& chosen, JsonValue& rejected) {
  auto &a = chosen.items(), &b = rejected.items();
  size_t count = 0;
  while (count < std::min(a.size(), b.size()) && same(a[count], b[count])) ++count;
  JsonValue prompt = JsonValue::array();
  std::move(a.begin(), a.begin() + static_cast<ptrdiff_t>(count), std::back_inserter(prompt.items()));
  a.erase(a.begin(), a.begin() + static_cast<ptrdiff_t>(count));
  b.erase(b.begin(), b.begin() + static_cast<ptrdiff_t>(count));
  return prompt;
}

}  // namespace

Record RecordReader::read_preference(JsonValue& line) const {
  Record record;
  const bool nemo = has(line, "completions") && !has(line, options_.chosen_key);
  const std::string prompt_key = nemo ? "context" : options_.prompt_key,
                    chosen_key = nemo ? "completion" : options_.chosen_key,
                    rejected_key = nemo ? "completion" : options_.rejected_key;
  Ranked texts;
  if (nemo) {
    texts = ranked(line);
  } else {
    for (const std::string& key : {chosen_key, rejected_key})
      if (!has(line, key))
        fail(Exit::data, "{}\"{}\" is missing: the record has {}", line.where(), key, keys_of(line));
    texts = {take(line, prompt_key), take(line, chosen_key), take(line, rejected_key)};
    if (texts.prompt.is_null()) {
      if (!texts.chosen.is_array() || !texts.rejected.is_array())
        fail(Exit::data, "{}\"{}\" is missing; only lists of messages in \"{}\" and \"{}\" may contain it",
             line.where(), prompt_key, chosen_key, rejected_key);
      texts.prompt = common_prompt(texts.chosen, texts.rejected);
      if (texts.prompt.items().empty())
        fail(Exit::data, "{}\"{}\" and \"{}\" have no common first message, which would be the prompt",
             texts.chosen.where(), chosen_key, rejected_key);
    }
  }
  if (texts.prompt.is_null()) fail(Exit::data, "{}\"{}\" is missing", line.where(), prompt_key);
  if (same(texts.chosen, texts.rejected))
    fail(Exit::data, "{}the chosen and the rejected completion are equal", texts.chosen.where());
  JsonValue prompt = texts.prompt;
  record.sequences.push_back(
      with_completion(std::move(prompt), std::move(texts.chosen), prompt_key, chosen_key));
  record.sequences.push_back(
      with_completion(std::move(texts.prompt), std::move(texts.rejected), prompt_key, rejected_key));
  constexpr auto margin = static_cast<size_t>(ExampleValue::margin);
  record.columns.values[margin] = true;
  if (has(line, "margin")) {
    record.numbers.values[margin] = line.get_double("margin");
    if (!std::isfinite(record.numbers.values[margin]))
      fail(Exit::data, "{}\"margin\" is not finite", line.where());
  }
  return record;
}

Record RecordReader::read_rollout(JsonValue& line) const {
  Record record;
  record.columns = read_rollout_numbers(line, record.numbers);
  const std::string &input = options_.input_key, &output = options_.output_key;
  if (!has(line, "prompt_ids") && !has(line, input))
    fail(Exit::data, "{}neither \"prompt_ids\" nor \"{}\": the record has {}", line.where(), input,
         keys_of(line));
  if (!has(line, "completion_ids")) {
    if (!has(line, output))
      fail(Exit::data, "{}neither \"completion_ids\" nor \"{}\": the record has {}", line.where(), output,
           keys_of(line));
    if (!has(line, input))
      fail(Exit::data, "{}\"prompt_ids\" without \"completion_ids\": both must be ids, or \"{}\" a text",
           line.where(), input);
    JsonValue prompt = take(line, input);
    record.sequences.push_back(with_completion(std::move(prompt), take(line, output), input, output));
    return record;
  }
  RecordSequence& sequence = record.sequences.emplace_back();
  sequence.completion_ids = read_ids(line, "completion_ids");
  if (has(line, "prompt_ids")) {
    sequence.prompt_ids = read_ids(line, "prompt_ids");
    return record;
  }
  JsonValue prompt = take(line, input);
  require_text_or_messages(prompt, input, with_template_);
  if (with_template_) {
    sequence.messages = as_messages(std::move(prompt), "user", input);
    sequence.prompt_messages = sequence.messages.items().size();
  } else {
    sequence.prompt = text_in(prompt, input);
  }
  return record;
}

DetectedFormat detect_format(const JsonValue& record, const ExampleOptions& options) {
  const auto all = [&](std::initializer_list<std::string> keys) {
    return std::all_of(keys.begin(), keys.end(), [&](const std::string& key) { return has(record, key); });
  };
  const auto named = [&](std::initializer_list<std::string> keys) {
    std::vector<std::string> quoted;
    for (const std::string& key : keys) quoted.push_back("\"" + key + "\"");
    return joined(quoted);
  };
  if (all({options.chosen_key, options.rejected_key}))
    return {ExampleFormat::preference, named({options.chosen_key, options.rejected_key})};
  if (all({"context", "completions"})) return {ExampleFormat::preference, named({"context", "completions"})};
  if (!options.chat_key.empty() && all({options.chat_key}))
    return {ExampleFormat::messages, named({options.chat_key})};
  if (options.chat_key.empty())
    for (const char* key : {"messages", "conversations"})
      if (all({key})) return {ExampleFormat::messages, named({key})};
  if (all({"completion_ids"})) return {ExampleFormat::rollouts, named({"completion_ids"})};
  if (all({options.input_key, options.output_key, "advantage"}))
    return {ExampleFormat::rollouts, named({options.input_key, options.output_key, "advantage"})};
  if (all({options.input_key, options.output_key}))
    return {ExampleFormat::instruction, named({options.input_key, options.output_key})};
  if (all({options.text_key})) return {ExampleFormat::text, named({options.text_key})};
  fail(Exit::data,
       "{}the format is not clear: the record has {}; expected \"messages\" (or \"conversations\"), \"{}\" "
       "and "
       "\"{}\", \"{}\" and \"{}\", or \"{}\". Fix: set data.train.format and the keys of the fields",
       record.where(), keys_of(record), options.input_key, options.output_key, options.chosen_key,
       options.rejected_key, options.text_key);
}

}  // namespace nrl::data
