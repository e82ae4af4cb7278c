// Prompts of conversations: tokens, and where the answer ends.

#include "apps/data/chat/chat_prompt.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/data/chat/template_choice.h"
#include "apps/data/tokenizer.h"
#include "core/base/error.h"
#include "core/io/atomic_file.h"
#include "core/io/json.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

namespace nrl::data {
namespace {

using Ids = std::vector<int32_t>;

constexpr int32_t first_added = 400;

/// A tokenizer.json with these special tokens from id 400 on.
std::unique_ptr<Tokenizer> tokenizer_with(const std::vector<std::string>& special) {
  const test::TemporaryDirectory directory;
  JsonValue json = read_json(std::string(NRL_TEST_DATA) + "/fixtures/llama3.json");
  JsonValue added = json.at("added_tokens");
  int32_t id = first_added;
  for (const std::string& text : special)
    added.push_back(JsonValue::object({{"id", id++},
                                       {"content", text},
                                       {"single_word", false},
                                       {"lstrip", false},
                                       {"rstrip", false},
                                       {"normalized", false},
                                       {"special", true}}));
  json.set("added_tokens", added);
  write_file_atomic(directory / "tokenizer.json", json.dump());
  write_file_atomic(directory / "generation_config.json", R"({"eos_token_id": [0, 9]})");
  return tokenizer_in(directory.path());
}

ChatPrompts prompts_of(const std::string& chat, const Tokenizer& tokenizer) {
  return {choose_chat_template(chat, tokenizer)->chat, render_options(tokenizer, "2026-01-02"), tokenizer};
}

JsonValue messages_of(const std::vector<std::pair<std::string, std::string>>& messages) {
  JsonValue list = JsonValue::array();
  for (const auto& [role, text] : messages) list.push_back(chat_message(role, text));
  return list;
}

const JsonValue question = messages_of({{"user", "hi"}});

bool contains(const Ids& ids, int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

std::string error_of(const ChatPrompts& prompts, const JsonValue& messages) {
  try {
    (void)prompts.prompt(messages);
  } catch (const Error& e) {
    CHECK(e.code() == Exit::data);
    return e.what();
  }
  return {};
}

TEST_CASE("A conversation is rendered and tokenized as a whole, up to the assistant's header") {
  const auto tokenizer = tokenizer_with({"<|im_start|>", "<|im_end|>"});
  const ChatPrompts prompts = prompts_of("chatml", *tokenizer);
  const Prompt prompt =
      prompts.prompt(messages_of({{"system", "be"}, {"user", "hi"}, {"assistant", "ho"}, {"user", " so "}}));
  const std::string text =
      "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>"
      "\n"
      "<|im_start|>user\n so <|im_end|>\n<|im_start|>assistant\n";
  CHECK(prompt.ids == tokenizer->encode(text));
  CHECK(prompt.ids.front() == first_added);
  CHECK(std::count(prompt.ids.begin(), prompt.ids.end(), first_added) == 5);
  // The end tokens of the model, and of the template.
  CHECK(prompt.end_ids == Ids{0, 9, first_added + 1});
  CHECK(prompt.end_text.empty());
}

TEST_CASE("The template writes the beginning token, once") {
  const auto tokenizer =
      tokenizer_with({"<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"});
  const Prompt prompt = prompts_of("llama3", *tokenizer).prompt(question);
  CHECK(prompt.ids ==
        tokenizer->encode("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
                          "<|start_header_id|>assistant<|end_header_id|>\n\n"));
  CHECK(std::count(prompt.ids.begin(), prompt.ids.end(), first_added) == 1);
  CHECK(prompt.end_ids == Ids{0, 9, first_added + 1});
}

TEST_CASE("An answer ends at the text after it where that is no token") {
  const auto bytes = make_byte_tokenizer();
  const int32_t end = *bytes->eos();
  Prompt prompt = prompts_of("chatml", *bytes).prompt(question);
  CHECK(bytes->decode(prompt.ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
  CHECK(prompt.end_ids == Ids{end});
  CHECK(prompt.end_text == "<|im_end|>");

  // The text of a special token is this token, which ends turns of the history, too.
  prompt = prompts_of("zephyr", *bytes).prompt(question);
  CHECK(contains(prompt.ids, end));
  CHECK(contains(prompt.end_ids, end));
  CHECK(prompt.end_text.empty());

  constexpr const char* turns = "{% for m in messages %}{{ m.content }}";
  prompt = prompts_of(std::string(turns) + " /end<|endoftext|>{% endfor %}", *bytes).prompt(question);
  CHECK(contains(prompt.end_ids, end));
  CHECK(prompt.end_text == "/end");
  prompt = prompts_of(std::string(turns) + "\n\n{% endfor %}", *bytes).prompt(question);
  CHECK(prompt.end_ids == Ids{end});
  CHECK(prompt.end_text.empty());
}

TEST_CASE("A template may refuse a conversation, or only an answer to it") {
  const auto bytes = make_byte_tokenizer();
  const ChatPrompts strict = prompts_of(
      "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('No system message, please') }}"
      "{% elif m.role == 'assistant' %}{{ raise_exception('No answers') }}{% endif %}{{ m.content }}{% "
      "endfor %}",
      *bytes);
  CHECK(error_of(strict, messages_of({{"system", "be"}, {"user", "hi"}})) ==
        "chat template: No system message, please");
  const Prompt prompt = strict.prompt(question);
  CHECK(bytes->decode(prompt.ids) == "hi");
  CHECK(prompt.end_ids == Ids{*bytes->eos()});
  CHECK(prompt.end_text.empty());
  CHECK_THAT(error_of(prompts_of("{% if false %}{% endif %}", *bytes), question),
             ContainsSubstring("no tokens"));
  CHECK_THROWS_AS(chat_message("user", "a\xff"), Error);
}

}  // namespace
}  // namespace nrl::data
