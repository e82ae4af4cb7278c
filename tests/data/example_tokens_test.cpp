// Examples with a tokenizer whose tokens have several bytes, and with its own chat template.
#include <string>
#include <vector>

#include "core/io/json.h"
#include "tests/catch.h"
#include "tests/data/example_files.h"

using namespace nrl;
using namespace nrl::data;
using namespace nrl::test;

namespace {

constexpr const char* marked_turns =
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m.content ~ '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

// Words of GPT-2's pre-tokenizer; merges h i, space b, space hi; <|im_start|> and <|im_end|> are special.
void write_tokenizer(const std::string& directory, const std::string& chat_template) {
  const auto bytes = make_byte_tokenizer();
  JsonValue json = parse_json(bytes->files().at(0).content, "tokenizer.json");
  JsonValue& pre = *json.members().find("pre_tokenizer");
  pre.set("use_regex", true);
  JsonValue& model = *json.members().find("model");
  JsonValue& vocab = *model.members().find("vocab");
  JsonValue merges = JsonValue::array();
  const std::pair<const char*, const char*> pairs[] = {{"h", "i"}, {"\u0120", "b"}, {"\u0120", "hi"}};
  int64_t id = 257;
  for (const auto& [left, right] : pairs) {
    vocab.set(std::string(left) + right, id++);
    merges.push_back(std::string(left) + " " + right);
  }
  model.set("merges", merges);
  JsonValue& added = *json.members().find("added_tokens");
  for (const char* text : {"<|im_start|>", "<|im_end|>"}) {
    JsonValue token = added.items().at(0);
    token.set("id", id++);
    token.set("content", text);
    added.push_back(token);
  }
  write_file_atomic(join_path(directory, "tokenizer.json"), json.dump());
  JsonValue config =
      JsonValue::object({{"tokenizer_class", "PreTrainedTokenizerFast"}, {"eos_token", "<|im_end|>"}});
  if (!chat_template.empty()) config.set("chat_template", chat_template);
  write_file_atomic(join_path(directory, "tokenizer_config.json"), config.dump());
}

// Ids, those with a loss marked.
std::string marked_ids(const ExampleSet& set, int64_t example, int sequence = 0) {
  std::string text;
  for (size_t t = 0; t < set.ids(example, sequence).size(); ++t)
    text += fmt::format("{}{}{}", t > 0 ? " " : "", set.ids(example, sequence)[t],
                        set.in_loss(example, sequence, static_cast<int64_t>(t)) ? "*" : "");
  return text;
}

struct TokenRecords : Records {
  explicit TokenRecords(const std::string& lines, const std::string& chat_template = "")
      : Records(lines, "default") {
    write_tokenizer(dir.path(), chat_template);
    tokenizer = make_tokenizer(dir.path());
  }
};

}  // namespace

TEST_CASE("a token that begins before the completion and ends in it has a loss", "[examples]") {
  // a, space b: the space belongs to the prompt.
  const TokenRecords straddles("{\"prompt\": \"a \", \"completion\": \"b\"}\n");
  CHECK(marked_ids(*straddles.open(), 0) == "97 258* 261*");
  const TokenRecords exact("{\"prompt\": \"a\", \"completion\": \" hi\"}\n");
  CHECK(marked_ids(*exact.open(), 0) == "97 259* 261*");
  const TokenRecords before("{\"prompt\": \"a hi\", \"completion\": \"!\"}\n");
  CHECK(marked_ids(*before.open(), 0) == "97 259 33* 261*");
  // The end token is there already.
  const TokenRecords ended("{\"prompt\": \"a\", \"completion\": \" b<|im_end|>\"}\n");
  CHECK(marked_ids(*ended.open(), 0) == "97 258* 261*");
  CHECK(ended.open()->counts().special_text.count == 1);
  // Another special token is no end.
  const TokenRecords started("{\"prompt\": \"a\", \"completion\": \" b<|im_start|>\"}\n");
  CHECK(marked_ids(*started.open(), 0) == "97 258* 260* 261*");
}

TEST_CASE("the tokenizer's chat template with generation blocks, in ids", "[examples]") {
  const char* lines =
      R"({"messages": [{"role": "b", "content": "hi b"}, {"role": "assistant", "content": "hi"}]})"
      "\n";
  const TokenRecords records(lines, marked_turns);
  const auto set = records.open();
  // <|im_start|>, b, newline, hi, space b, <|im_end|>, newline, <|im_start|>, assistant, newline, hi,
  // <|im_end|>, newline
  CHECK(marked_ids(*set, 0) ==
        "260 98 10 257 258 261 10 260 97 115 115 105 115 116 97 110 116 10 257* 261* 10");
  CHECK(set->counts().no_end_token.count == 0);
  bool named = false;
  for (const std::string& note : set->notes())
    named = named || contains(note, "chat template: the tokenizer's");
  CHECK(named);
  // The same template without the blocks gives the same masks.
  std::string unmarked = marked_turns;
  for (const std::string tag : {"{% generation %}", "{% endgeneration %}"})
    unmarked.erase(unmarked.find(tag), tag.size());
  const TokenRecords other(lines, unmarked);
  CHECK(marked_ids(*other.open(), 0) == marked_ids(*set, 0));
}

TEST_CASE("built-in templates end turns with the tokenizer's token", "[examples]") {
  TokenRecords records(
      R"({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "b"},)"
      R"( {"role": "user", "content": "c"}, {"role": "assistant", "content": " hi"}]})"
      "\n");
  records.options.chat_template = "chatml";
  const auto set = records.open();
  std::string text;
  bool inside = false;
  for (size_t t = 0; t < set->ids(0, 0).size(); ++t) {
    const int32_t id = set->ids(0, 0)[t];
    if (set->in_loss(0, 0, static_cast<int64_t>(t)) != inside) text += (inside = !inside) ? "[" : "]";
    text += id == 260 ? "<" : id == 261 ? ">" : records.tokenizer->decode(set->ids(0, 0).subspan(t, 1));
  }
  CHECK(contains(text, "<user\nhi>\n<assistant\n[b>]\n<user\nc>\n<assistant\n[ hi>]\n"));
  CHECK(set->counts().no_end_token.count == 0);
}

TEST_CASE("a tokenizer without a template needs one for messages", "[examples]") {
  const TokenRecords records("{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\"}]}\n");
  CHECK(contains(records.error().text, "needs a chat template, and the tokenizer has none"));
}

TEST_CASE("tools and variables reach the template; those of a record take precedence", "[examples]") {
  const char* text =
      "{% if tools %}{{ tools|tojson }}{% endif %}{{ style }}|{{ mood }}|{% for m in messages %}{{ m.content "
      "}}"
      "<|im_end|>{% endfor %}";
  TokenRecords records(
      R"({"messages": [{"role": "assistant", "content": "x"}], "tools": [{"n": 1}], "chat_template_kwargs":)"
      R"( {"style": "own"}})"
      "\n"
      R"({"messages": [{"role": "assistant", "content": "x"}], "tools": "[{\"n\": 1}]"})"
      "\n"
      R"({"messages": [{"role": "assistant", "content": "x"}], "tools": []})"
      "\n",
      text);
  records.options.chat_template_kwargs = JsonValue::object({{"style", "all"}, {"mood", "m"}});
  const auto set = records.open();
  const auto decoded = [&](int64_t i) { return records.tokenizer->decode(set->ids(i, 0)); };
  CHECK(decoded(0) == R"([{"n": 1}]own|m|x)");
  CHECK(decoded(1) == R"([{"n": 1}]all|m|x)");
  CHECK(decoded(2) == "all|m|x");
}

TEST_CASE("a template that prints the date keeps it, and says which", "[examples]") {
  TokenRecords records(
      R"({"messages": [{"role": "assistant", "content": "x"}]})"
      "\n",
      "{{ strftime_now('%d %b %Y') }}: {% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}");
  records.options.template_date = "2024-07-26";
  CHECK(records.tokenizer->decode(records.open()->ids(0, 0)) == "26 Jul 2024: x");
  records.options.template_date = "2024-02-30";
  CHECK(contains(records.error().text, "template_date '2024-02-30': no such day"));
  records.options.template_date = "yesterday";
  CHECK(contains(records.error().text, "template_date 'yesterday': expected YYYY-MM-DD"));
  records.options.template_date.clear();
  bool noted = false;
  const auto set = records.open();
  for (const std::string& note : set->notes()) noted = noted || contains(note, "prints a date");
  CHECK(noted);
}
