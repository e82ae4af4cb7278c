// The assistant's turns in rendered conversations.

#include <string>
#include <string_view>
#include <vector>

#include "apps/data/chat/assistant_spans.h"
#include "apps/data/chat/chat_template.h"
#include "core/base/error.h"
#include "core/io/json.h"
#include "tests/catch.h"
#include "tests/data/chat_files.h"

namespace nrl::data {
namespace {

const std::vector<std::string> ends = {"<|close|>", "</s>", "<|end|>", "<|im_end|>", "<|eot|>\n"};

struct Found {
  std::vector<AssistantSpan> spans;
  std::vector<std::string> texts;
  std::string text;
};

Found find(const ChatTemplate& chat, const Conversation& conversation, RenderOptions options = {}) {
  options.special_tokens = JsonValue::object({{"bos_token", "<s>"}, {"eos_token", "</s>"}});
  const Rendered rendered = chat.render(conversation, options);
  Found found{assistant_spans(chat, conversation, options, rendered, ends), {}, rendered.text};
  for (const AssistantSpan& span : found.spans)
    found.texts.push_back(rendered.text.substr(span.region.begin, span.region.end - span.region.begin));
  return found;
}

Found find(std::string_view name, std::string_view messages, RenderOptions options = {},
           JsonValue kwargs = {}) {
  return find(template_file(name), Conversation{parse_json(messages, "messages"), {}, std::move(kwargs)},
              options);
}

using Texts = std::vector<std::string>;

constexpr std::string_view three_turns = R"([{"role":"system","content":"S"},{"role":"user","content":"1?"},
  {"role":"assistant","content":"one"},{"role":"user","content":"2?"},{"role":"assistant","content":"two"},
  {"role":"user","content":"3?"},{"role":"assistant","content":"three"}])";

TEST_CASE("Spans of several turns include their end tokens") {
  const Found found = find("tools", three_turns);
  CHECK(found.texts == Texts{"one<|close|>", "two<|close|>", "three<|close|>"});
  REQUIRE(found.spans.size() == 3);
  CHECK(found.spans[1].message == 4);
  for (const AssistantSpan& span : found.spans) CHECK(span.ended);
}

TEST_CASE("Spans of generation blocks are the blocks") {
  const ChatTemplate chat = ChatTemplate::parse(builtin_chat_template("zephyr"), "zephyr");
  const Found found = find(chat, {parse_json(three_turns, "messages"), {}, {}});
  CHECK(found.texts == Texts{"one</s>", "two</s>", "three</s>"});
  REQUIRE(found.spans.size() == 3);
  CHECK(found.spans[2].message == 6);
  CHECK(found.spans[2].ended);
  // A block that leaves the end token out is not extended.
  const ChatTemplate open = ChatTemplate::parse(
      "{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content if m.role == 'assistant' }}"
      "{% endgeneration %}</s>{% endfor %}",
      "open");
  const Found bare = find(open, {parse_json(three_turns, "messages"), {}, {}});
  CHECK(bare.texts == Texts{"one", "two", "three"});
  CHECK_FALSE(bare.spans[0].ended);
  // White space may follow the token, or be a part of it.
  const ChatTemplate spaced = ChatTemplate::parse(
      "{% for m in messages %}{% generation %}{{ m.content + '</s>\n'"
      " if m.role == 'assistant' }}{% endgeneration %}{% endfor %}",
      "spaced");
  CHECK(find(spaced, {parse_json(three_turns, "messages"), {}, {}}).spans[0].ended);
  const ChatTemplate newline = ChatTemplate::parse(
      "{% for m in messages %}{% generation %}{{ m.content + '<|eot|>\n' if m.role == 'assistant' }}"
      "{% endgeneration %}{% endfor %}",
      "newline");
  CHECK(find(newline, {parse_json(three_turns, "messages"), {}, {}}).spans[0].ended);
}

TEST_CASE("Spans of tool calls end after the call") {
  const Found found = find("tools", R"([{"role":"user","content":"w?"},{"role":"assistant","content":"look",
    "tool_calls":[{"function":{"name":"f","arguments":{"a":"<|open|>"}}}]},{"role":"tool","content":"21"},
    {"role":"assistant","tool_calls":[{"function":{"name":"g","arguments":"{}"}}]},{"role":"tool","content":"5"},
    {"role":"assistant","content":"done"}])");
  CHECK(found.texts ==
        Texts{"look\n<call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"<|open|>\"}}\n</call><|close|>",
              "<call>\n{\"name\": \"g\", \"arguments\": {}}\n</call><|close|>", "done<|close|>"});
}

TEST_CASE("Spans begin after the end of tool outputs that only the prompt shows") {
  const Found found = find("outputs", R"([{"role":"user","content":"w?"},{"role":"assistant","content":"look",
    "tool_calls":[{"type":"function","function":{"name":"f","arguments":{}}}]},{"role":"tool","content":"21"},
    {"role":"assistant","content":"done"}])");
  REQUIRE(found.texts.size() == 2);
  CHECK(found.texts[0].starts_with("look<|calls|>"));
  CHECK(found.texts[0].ends_with("<|/calls|><|end|>"));
  CHECK(found.texts[1] == "done<|end|>");
  CHECK(found.text.substr(0, found.spans[1].region.begin).ends_with("<|/output|><|/outputs|>"));
}

TEST_CASE("The span of a continued message begins after the outputs of its tools") {
  RenderOptions options;
  options.continue_final_message = true;
  const Found found = find("outputs", R"([{"role":"user","content":"w?"},{"role":"assistant","content":"",
    "tool_calls":[{"type":"function","function":{"name":"f","arguments":{}}}]},{"role":"tool","content":"21"},
    {"role":"assistant","content":"It is"}])",
                           options);
  REQUIRE(found.texts.size() == 2);
  CHECK(found.texts[1] == "It is");
}

constexpr std::string_view reasoned = R"([{"role":"user","content":"1?"},
  {"role":"assistant","content":"<think>\na\n</think>\n\none"},{"role":"user","content":"2?"},
  {"role":"assistant","reasoning_content":"b","content":"two"},{"role":"tool","content":"r"},
  {"role":"assistant","reasoning_content":"c","content":"three"}])";

TEST_CASE("Reasoning that the template removes is not part of a span") {
  const Found found = find("thinking", reasoned);
  CHECK(found.texts == Texts{"one<|close|>", "<think>\nb\n</think>\n\ntwo<|close|>",
                             "<think>\nc\n</think>\n\nthree<|close|>"});
  // The reasoning of the second question goes when there is a third one: its turns have no prefix then.
  JsonValue longer = parse_json(reasoned, "messages");
  longer.push_back(JsonValue::object({{"role", "user"}, {"content", "3?"}}));
  longer.push_back(JsonValue::object({{"role", "assistant"}, {"content", "x"}}));
  const Found later = find(template_file("thinking"), {longer, {}, {}});
  CHECK(later.texts ==
        Texts{"one<|close|>", "two<|close|>", "three<|close|>", "<think>\n\n</think>\n\nx<|close|>"});
  // The prompt without thinking is no prefix of the text: the part of it that is there is left out.
  const Found off = find("thinking", reasoned, {}, JsonValue::object({{"enable_thinking", false}}));
  CHECK(off.texts == found.texts);
}

TEST_CASE("A system message that moves to the last question does not move the spans") {
  const Found found = find("merged", three_turns);
  CHECK(found.text.find("[ASK] S\n\n3?") == std::string::npos);
  CHECK(found.texts == Texts{" one</s>", " two</s>", " three</s>"});
  const Found question = find("merged", R"([{"role":"system","content":"S"},{"role":"user","content":"1?"},
    {"role":"assistant","content":"one"},{"role":"user","content":"2?"}])");
  CHECK(question.text.find("[ASK] S\n\n2?[/ASK]") != std::string::npos);
  CHECK(question.texts == Texts{" one</s>"});
}

TEST_CASE("The span of a continued message ends with the text") {
  RenderOptions options;
  options.continue_final_message = true;
  const Found found = find("tools", three_turns, options);
  CHECK(found.text.ends_with("three"));
  CHECK(found.texts == Texts{"one<|close|>", "two<|close|>", "three"});
  CHECK_FALSE(found.spans[2].ended);
  CHECK(found.spans[1].ended);
}

TEST_CASE("Contents may be empty, repeat a header, or contain end tokens") {
  const Found found = find("tools", R"([{"role":"user","content":"<|open|>assistant\n"},
    {"role":"assistant","content":"a<|close|>b"},{"role":"assistant","content":"<|open|>assistant\n"},
    {"role":"user","content":""},{"role":"assistant","content":" "},{"role":"assistant","content":"é"}])");
  CHECK(found.texts ==
        Texts{"a<|close|>b<|close|>", "<|open|>assistant\n<|close|>", " <|close|>", "é<|close|>"});
}

TEST_CASE("A text without an end token ends with the content") {
  const ChatTemplate chat = ChatTemplate::parse(
      "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
      "{{ 'assistant: ' if add_generation_prompt }}",
      "plain");
  const Found found = find(chat, {parse_json(three_turns, "messages"), {}, {}});
  CHECK(found.texts == Texts{"one", "two", "three"});
  for (const AssistantSpan& span : found.spans) CHECK_FALSE(span.ended);
}

TEST_CASE("Messages that a template leaves out have no span") {
  const ChatTemplate chat = ChatTemplate::parse(
      "{% for m in messages if m.content != 'one' %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
      "{{ '<assistant>' if add_generation_prompt }}",
      "filter");
  const Found found = find(chat, {parse_json(three_turns, "messages"), {}, {}});
  CHECK(found.texts == Texts{"two</s>", "three</s>"});
  CHECK(found.spans[0].message == 4);
}

TEST_CASE("A template without loops over messages has spans by its prefixes, or an error") {
  constexpr std::string_view loop =
      "{% for i in range(messages|length) %}{{ messages[i].role ~ ':' ~ messages[i].content }}</s>{% endfor "
      "%}"
      "{{ 'assistant:' if add_generation_prompt }}";
  const Conversation conversation{parse_json(three_turns, "messages"), {}, {}};
  const Found found = find(ChatTemplate::parse(std::string(loop), "indices"), conversation);
  CHECK(found.texts == Texts{"one</s>", "two</s>", "three</s>"});
  const ChatTemplate changing = ChatTemplate::parse("{{ messages|length }}" + std::string(loop), "changing");
  try {
    find(changing, conversation);
    FAIL("no error");
  } catch (const Error& e) {
    CHECK(e.code() == Exit::data);
    CHECK_THAT(e.what(), ContainsSubstring("changing: the beginning of message 3 cannot be found"));
  }
}

TEST_CASE("Spans of long conversations are those of short ones") {
  JsonValue messages;
  Texts wanted;
  for (int i = 0; i < 200; ++i) {
    const std::string answer = "answer " + std::to_string(i);
    messages.push_back(JsonValue::object({{"role", "user"}, {"content", "question"}}));
    JsonValue message = JsonValue::object({{"role", "assistant"}, {"content", answer}});
    if (i % 7 == 3) {
      message.set("tool_calls",
                  parse_json(R"([{"type":"function","function":{"name":"f","arguments":{}}}])", "calls"));
      messages.push_back(message);
      messages.push_back(JsonValue::object({{"role", "tool"}, {"content", "result"}}));
      messages.push_back(JsonValue::object({{"role", "assistant"}, {"content", answer}}));
      wanted.push_back(answer +
                       "<|calls|><|call|>function<|sep|>f\n```json\n{}\n```<|/call|><|/calls|><|end|>");
    } else {
      messages.push_back(message);
    }
    wanted.push_back(answer + "<|end|>");
  }
  CHECK(find(template_file("outputs"), {messages, {}, {}}).texts == wanted);
}

}  // namespace
}  // namespace nrl::data
