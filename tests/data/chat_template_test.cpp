// Errors, limits and built-in templates of the chat template engine.

#include "apps/data/chat/chat_template.h"

#include <atomic>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "apps/data/chat/assistant_spans.h"
#include "core/base/error.h"
#include "core/io/json.h"
#include "tests/catch.h"
#include "tests/data/chat_files.h"

namespace nrl::data {
namespace {

Conversation conversation(std::string_view messages = R"([{"role":"user","content":"x"}])") {
  return {parse_json(messages, "messages"), {}, {}};
}

/// The text of the error of parsing or rendering; empty if there is none.
std::string error_of(std::string source, const Conversation& input = conversation()) {
  try {
    (void)ChatTemplate::parse(std::move(source), "t").render(input, {});
  } catch (const Error& e) {
    CHECK(e.code() == Exit::data);
    return e.what();
  }
  return {};
}

std::string text_of(std::string source, const Conversation& input = conversation()) {
  return ChatTemplate::parse(std::move(source), "t").render(input, {}).text;
}

TEST_CASE("Built-in templates are the ones of the vectors") {
  for (const char* name : {"chatml", "llama3", "zephyr"}) {
    REQUIRE(builtin_chat_template(name) != nullptr);
    CHECK(builtin_chat_template(name) == template_text(name));
    CHECK(ChatTemplate::parse(builtin_chat_template(name), name).has_generation_blocks());
  }
  CHECK(builtin_chat_template("llama4") == nullptr);
}

TEST_CASE("Unsupported constructs are errors of parsing, with their place") {
  CHECK(error_of("a\n {{ x | nope }}") == "t:2:9: the filter 'nope' is not supported");
  CHECK(error_of("{% if false %}{{ x is nope }}{% endif %}") == "t:1:23: the test 'nope' is not supported");
  CHECK(error_of("{{ x.encode() }}") == "t:1:6: the method 'encode' is not supported");
  CHECK(error_of("é {% include 'x' %}") == "t:1:6: unsupported statement 'include'");
  CHECK(error_of("{% frob %}") == "t:1:4: unknown statement 'frob'");
  CHECK(error_of("{{ l|map('nope') }}") == "t:1:10: the filter 'nope' is not supported");
  CHECK(error_of("{{ l|selectattr('a', 'nope') }}") == "t:1:22: the test 'nope' is not supported");
  CHECK(error_of("{{ 2 ** 3 }}") == "t:1:6: the operator ** is not supported");
  CHECK(error_of("{% for m in messages recursive %}{% endfor %}") ==
        "t:1:22: recursive loops are not supported");
  CHECK(error_of("{{ 'a' }") == "t:1:8: unexpected '}'");
  CHECK(error_of("{{ [1 }}") == "t:1:7: unexpected '}'");
  CHECK(error_of("{% if true %}") == "t:1:14: the template ends; expected {% endif %}");
  CHECK(error_of("{{ 1") == "t:1:1: the expression has no end; expected }}");
  CHECK(error_of("{{ '\\ud800' }}") == "t:1:5: the escape is not a character");
  CHECK(error_of("{% macro m() %}{{ varargs }}{% endmacro %}") ==
        "t:1:19: 'varargs' in a macro is not supported");
  CHECK(error_of("{{ cycler('a') }}") == "t:1:4: the global 'cycler' is not supported");
  CHECK(error_of("{{ x = 1 }}") == "t:1:6: unexpected '='; expected '}}'");
  CHECK(error_of("{% if true %}{% continue %}{% endif %}") == "t:1:17: 'continue' outside of a loop");
  CHECK_THAT(error_of("\xFF"), ContainsSubstring("not valid UTF-8"));
}

TEST_CASE("Errors of rendering have their place, except for the template's own") {
  CHECK(error_of("{{ raise_exception('Roles: ' + 'x') }}") == "Roles: x");
  CHECK(error_of("a\n{{ x.y }}") == "t:2:6: 'x' is undefined");
  CHECK(error_of("{{ messages[0].a.b }}") == "t:1:18: 'dict object' has no attribute 'a'");
  CHECK(error_of("{{ 'a' % 1 }}") == "t:1:8: the formatting operator % is not supported");
  CHECK(error_of("{{ 9223372036854775807 + 1 }}") == "t:1:24: integers beyond 64 bits are not supported");
  CHECK(error_of("{{ messages|map('upper') }}") == "t:1:13: a generator is printed; add the filter list");
  CHECK_THAT(error_of("", conversation("[]")), ContainsSubstring("no messages"));
  CHECK_THAT(error_of("", conversation("[1]")),
             ContainsSubstring("message 1 is an integer; expected an object"));
  CHECK_THAT(error_of("", conversation("5")), ContainsSubstring("expected"));
  RenderOptions both;
  both.add_generation_prompt = both.continue_final_message = true;
  CHECK_THROWS_AS(ChatTemplate::parse("", "t").render(conversation(), both), Error);
}

TEST_CASE("Messages lose null members and gain the names of their reasoning") {
  const auto show = [](std::string_view message) {
    return text_of("{{ messages[0] }}", conversation('[' + std::string(message) + ']'));
  };
  CHECK(show(R"({"role":"a","content":null,"x":[null]})") == "{'role': 'a', 'x': [None]}");
  CHECK(show(R"({"role":"a","thinking":"T"})") == "{'thinking': 'T', 'role': 'a', 'reasoning_content': 'T'}");
  CHECK(show(R"({"role":"a","reasoning":"R","thinking":"T"})") ==
        "{'thinking': 'T', 'role': 'a', 'reasoning': 'R', 'reasoning_content': 'T'}");
  CHECK(
      text_of("{{ tools is defined }}{{ tools is none }}{{ documents is none }}{{ bos_token is defined }}") ==
      "TrueTrueTrueFalse");
}

TEST_CASE("Regions are the output of loops over messages") {
  const Conversation input =
      conversation(R"([{"role":"s","content":"a"},{"role":"u","content":"b"},{"role":"v","content":"c"}])");
  const auto regions = [&](std::string source) {
    const Rendered rendered = ChatTemplate::parse(std::move(source), "t").render(input, {});
    std::vector<std::string> texts;
    for (const Region& r : rendered.messages) texts.push_back(rendered.text.substr(r.begin, r.end - r.begin));
    return texts;
  };
  using Texts = std::vector<std::string>;
  CHECK(regions("<{% for m in messages %}[{{ m.content }}]{% endfor %}>") == Texts{"[a]", "[b]", "[c]"});
  CHECK(regions("{% for m in messages[1:] | list %}{{ m.content }};{% endfor %}") == Texts{"", "b;", "c;"});
  CHECK(regions("{% for m in messages[::-1] if m.role != 'u' %}{{ m.content }}{% endfor %}") ==
        Texts{"a", "", "c"});
  CHECK(regions("{% for m in messages %}{% for x in [1, 2] %}{{ x }}{% endfor %}{% endfor %}") ==
        Texts{"12", "12", "12"});
  CHECK(regions("{% macro all(l) %}{% for m in l %}{{ m.content }}{% endfor %}{% endmacro %}-{{ "
                "all(messages) }}") == Texts{"a", "b", "c"});
  CHECK(regions("{% for i, m in [(0, messages[2]), (1, messages[0])] %}{{ i }}{% endfor %}") ==
        Texts{"1", "", "0"});
  // The innermost loop owns the output.
  CHECK(regions("{% for m in messages[:1] %}({% for n in messages[1:] %}{{ n.content }}{% endfor %}){% "
                "endfor %}") == Texts{"(bc)", "b", "c"});
  // Text that is kept in a variable has no owner.
  CHECK(regions("{% set s %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ s }}") ==
        Texts{"", "", ""});
}

TEST_CASE("Hostile templates end with an error") {
  const auto is_bounded = [](std::string source, std::string_view error) {
    INFO(source.substr(0, 100));
    CHECK_THAT(error_of(std::move(source)), ContainsSubstring(std::string(error)));
  };
  const std::string steps = "takes more than 10000000 steps", bytes = "MiB", levels = "nested";
  is_bounded("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", steps);
  is_bounded("{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
             bytes);
  is_bounded("{{ 'abc' * 99999999999 }}", bytes);
  is_bounded("{{ [1] * 99999999999 }}", bytes);
  is_bounded("{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}", bytes);
  is_bounded("{{ ('x' * 9999999).replace('x', 'y' * 9999999) }}", bytes);
  is_bounded(
      "{% set n = namespace(l=[]) %}{% for i in range(9999) %}{% set n.l = [n.l] %}{% endfor %}{{ n.l }}",
      levels);
  is_bounded(
      "{% set n = namespace(l=[]) %}{% for i in range(99) %}{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l }}",
      bytes);
  is_bounded(
      "{% set n = namespace(l=[1], m=[1]) %}{% for i in range(99) %}{% set n.l = [n.l, n.l] %}"
      "{% set n.m = [n.m, n.m] %}{% endfor %}{{ n.l == n.m }}",
      steps);
  is_bounded("{% set n = namespace() %}{% set n.n = n %}{{ n }}", levels);
  is_bounded("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", levels);
  is_bounded("{% macro m() %}{{ m() ~ m() }}{% endmacro %}{{ m() }}", levels);
  is_bounded("{{ " + std::string(9999, '(') + "1" + std::string(9999, ')') + " }}", levels);
  is_bounded("{{ " + std::string(9999, '-') + "1 }}", levels);
  std::string sum = "1";
  for (int i = 0; i < 9999; ++i) sum += "+1";
  is_bounded("{{ " + sum + " }}", "levels");
  std::string blocks;
  for (int i = 0; i < 9999; ++i) blocks += "{% if true %}";
  is_bounded(blocks, levels);
  is_bounded("{% for i in range(9) %}{{ ('a' * 60000000).split('a')|length }}{% endfor %}", steps);
  is_bounded("{% for i in range(9) %}{{ ('a ' * 30000000).split()|length }}{% endfor %}", steps);
  is_bounded("{% for c in 'a' * 60000000 %}{% endfor %}", steps);
  is_bounded("{{ range(99999999) }}", "Range too big");
  is_bounded("{{ ('a' * 9999999).find('a' * 999999 ~ 'b') }}{{ ('a' * 9999999).find('a' * 999999 ~ 'b') }}",
             steps);
  is_bounded("{{ strftime_now('%999999999d') }}", "longer");
}

TEST_CASE("One template renders in several threads") {
  const ChatTemplate chat = template_file("macros");
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      const Conversation input =
          conversation(R"([{"role":"user","content":")" + std::to_string(t) + R"("}])");
      RenderOptions options;
      options.now = time_of("2025-07-26T14:05:09");
      for (int i = 0; i < 200; ++i)
        wrong += chat.render(input, options).text.find("\n" + std::to_string(t) + "\n") == std::string::npos;
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
}

TEST_CASE("Mutated templates render or end with an error") {
  std::mt19937 random(7);
  const auto pick = [&](size_t size) { return std::uniform_int_distribution<size_t>(0, size - 1)(random); };
  const JsonValue shared = read_json(chat_directory() / "conversations.json");
  std::vector<Conversation> inputs;
  for (const JsonMember& member : shared.at("conversations").members())
    inputs.push_back({member.value.at("messages"), member.value.at("tools"), member.value.at("kwargs")});
  std::vector<std::string> sources;
  for (const char* name : {"tools", "thinking", "merged", "outputs", "macros", "chatml"})
    sources.push_back(template_text(name));
  constexpr std::string_view parts[] = {"{{",         "}}",   "{%",     "%}",   "{%-",      "-%}",
                                        "|",          ".",    "[",      "]",    "(",        ")",
                                        "'",          "1",    "+",      " in ", "messages", "{% endfor %}",
                                        "{% else %}", " if ", "[::-1]", "~",    "\xC3\xA9"};
  const std::vector<std::string> end_tokens = {"<|close|>", "</s>"};
  size_t rendered = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string source = sources[pick(sources.size())];
    for (size_t edit = 0; edit <= pick(3); ++edit) {
      const size_t at = pick(source.size()), size = pick(12);
      switch (pick(4)) {
        case 0:
          source.erase(at, size);
          break;
        case 1:
          source.insert(at, parts[pick(std::size(parts))]);
          break;
        case 2:
          source.insert(at, source.substr(pick(source.size()), 8 * size));
          break;
        default:
          source[at] = static_cast<char>(' ' + pick(95));
      }
      if (source.empty()) source = "{{ x }}";
    }
    try {
      const ChatTemplate chat = ChatTemplate::parse(source, "t");
      const Conversation& input = inputs[pick(inputs.size())];
      RenderOptions options;
      options.add_generation_prompt = pick(2) == 0;
      const Rendered result = chat.render(input, options);
      ++rendered;
      for (const Region& r : result.messages) REQUIRE((r.begin <= r.end && r.end <= result.text.size()));
      for (const AssistantSpan& s : assistant_spans(chat, input, options, result, end_tokens))
        REQUIRE((s.region.begin <= s.region.end && s.region.end <= result.text.size()));
    } catch (const Error& e) {
      REQUIRE(e.code() == Exit::data);
    }
  }
  CHECK(rendered > 100);
}

}  // namespace
}  // namespace nrl::data
