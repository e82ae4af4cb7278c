// Records of all formats as token ids and masks.
#include <string>
#include <vector>

#include "apps/data/examples/example_set.h"
#include "tests/catch.h"
#include "tests/data/example_files.h"

using namespace nrl;
using namespace nrl::data;
using namespace nrl::test;

namespace {

constexpr const char* two_turns =
    R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"},)"
    R"( {"role": "user", "content": "d"}, {"role": "assistant", "content": "ef"}]})"
    "\n";

// The number of sequences and lengths agree with the masks.
void check_lengths(const ExampleSet& set) {
  int64_t tokens = 0, loss = 0;
  for (int64_t i = 0; i < set.size(); ++i)
    for (int s = 0; s < set.sequences_per_example(); ++s) {
      const SequenceLength length = set.length(i, s);
      CHECK(length.tokens == static_cast<int64_t>(set.ids(i, s).size()));
      int masked = 0;
      for (int64_t t = 0; t < length.tokens; ++t) masked += set.in_loss(i, s, t);
      CHECK(length.loss_tokens == masked);
      CHECK_FALSE(set.in_loss(i, s, 0));
      tokens += length.tokens;
      loss += masked;
    }
  CHECK(set.counts().tokens == tokens);
  CHECK(set.counts().loss_tokens == loss);
  CHECK(set.counts().examples == set.size());
  CHECK(set.counts().sequences == set.size() * set.sequences_per_example());
}

}  // namespace

TEST_CASE("text: all tokens but the first have a loss, the end token too", "[examples]") {
  Records records("{\"text\": \"abc\"}\n\n{\"other\": 1, \"text\": \"d\\u00e9\"}\n");
  const auto set = records.open();
  REQUIRE(set->size() == 2);
  CHECK(set->format() == ExampleFormat::text);
  CHECK(set->train_on() == TrainOn::all);
  CHECK(std::vector<int32_t>(set->ids(0, 0).begin(), set->ids(0, 0).end()) ==
        std::vector<int32_t>{'a', 'b', 'c', 256});
  CHECK(marked(*set, *records.tokenizer, 0) == "a[bc$]");
  CHECK(marked(*set, *records.tokenizer, 1) == "d[\xc3\xa9$]");
  CHECK(set->length(0, 0).loss_tokens == 3);
  CHECK(set->where(1) == records.dir / "data.jsonl:3");
  CHECK(set->source_row(1) == 1);
  CHECK(set->value(1, ExampleValue::margin) == 0);
  CHECK(set->columns() == ExampleColumns{});
  check_lengths(*set);
  REQUIRE(set->notes().size() == 1);
  CHECK(contains(set->notes()[0], "format: text"));
  CHECK(contains(set->notes()[0], "data.jsonl:1 has \"text\""));

  records.options.add_eos = false;
  CHECK(marked(records) == "a[bc]");
  CHECK(records.open()->counts().no_end_token.count == 2);
  records.options.train_on = TrainOn::assistant;
  CHECK(contains(records.error().text, "train_on: assistant does not apply to the format text"));
}

TEST_CASE("text: files without lines are one text each", "[examples]") {
  Records records("one\ntwo\n", "none", "b.txt");
  write_file_atomic(records.dir / "a.txt", "first");
  records.options.inputs = {records.dir.path()};
  records.options.cache_dir = records.dir / "cache";
  const auto set = records.open();
  REQUIRE(set->size() == 2);
  CHECK(marked(*set, *records.tokenizer, 0) == "f[irst$]");
  CHECK(marked(*set, *records.tokenizer, 1) == "o[ne\ntwo\n$]");
  CHECK(set->where(1) == records.dir / "b.txt:1");
  write_file_atomic(records.dir / "a.txt", "one\ntw\xff");
  CHECK(contains(records.error().text, "a.txt:2: not UTF-8 text: byte 0xff. Fix: convert the file"));
  records.options.on_bad_record = OnBadRecord::skip;
  CHECK(records.open()->size() == 1);
  CHECK(records.open()->counts().skipped.count == 1);
  records.options.format = ExampleFormat::messages;
  records.options.chat_template = plain_turns;
  CHECK(contains(records.error().text, "a.txt: not JSON lines"));
}

TEST_CASE("instruction without a template: prompt, completion and end token", "[examples]") {
  Records records("{\"prompt\": \"3172=\", \"completion\": \"1237\"}\n");
  CHECK(marked(records) == "3172=[1237$]");
  check_lengths(*records.open());
  records.options.train_on = TrainOn::all;
  CHECK(marked(records) == "3[172=1237$]");
  records.options.train_on = TrainOn::assistant;
  CHECK(marked(records) == "3172=[1237$]");
  records.options.add_eos = false;
  CHECK(marked(records) == "3172=[1237]");

  write_file_atomic(records.dir / "prompt.txt", "Sort {}, {{please}}: ");
  records.options.prompt_file = records.dir / "prompt.txt";
  CHECK(marked(records) == "Sort 3172=, {please}: [1237]");
  records.options.system_prompt_file = records.dir / "prompt.txt";
  CHECK(contains(records.error().text, "system_prompt_file needs a chat template"));
  records.options.system_prompt_file.clear();
  write_file_atomic(records.dir / "prompt.txt", "no place");
  CHECK(contains(records.error().text, "no {}, which stands for the prompt"));
  write_file_atomic(records.dir / "prompt.txt", "a\n{b}");
  CHECK(contains(records.error().text, "prompt.txt:2: a single brace"));
}

TEST_CASE("instruction with a template: messages, with NeMo's keys and prompts", "[examples]") {
  Records records("{\"q\": \"2+2\", \"a\": \"4\"}\n", plain_turns);
  records.options.input_key = "q";
  records.options.output_key = "a";
  CHECK(marked(records) == "<|user|>2+2$\n<|assistant|>[4$]\n");
  write_file_atomic(records.dir / "prompt.txt", "Solve {}.");
  write_file_atomic(records.dir / "system.txt", "Be brief");
  records.options.prompt_file = records.dir / "prompt.txt";
  records.options.system_prompt_file = records.dir / "system.txt";
  CHECK(marked(records) == "<|system|>Be brief$\n<|user|>Solve 2+2.$\n<|assistant|>[4$]\n");
}

TEST_CASE("instruction: the loss is on the completion only, which may have several turns", "[examples]") {
  Records records(
      R"({"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},)"
      R"( {"role": "user", "content": "c"}], "completion": [{"role": "assistant", "content": "d"},)"
      R"( {"role": "tool", "content": "e"}, {"role": "assistant", "content": "f"}]})"
      "\n",
      plain_turns);
  CHECK(marked(records) ==
        "<|user|>a$\n<|assistant|>b$\n<|user|>c$\n<|assistant|>[d$]\n"
        "<|tool|>e$\n<|assistant|>[f$]\n");
  records.options.train_on = TrainOn::assistant;
  CHECK(marked(records) ==
        "<|user|>a$\n<|assistant|>[b$]\n<|user|>c$\n<|assistant|>[d$]\n"
        "<|tool|>e$\n<|assistant|>[f$]\n");
  records.options.train_on = TrainOn::last_assistant;
  CHECK(marked(records) ==
        "<|user|>a$\n<|assistant|>b$\n<|user|>c$\n<|assistant|>d$\n"
        "<|tool|>e$\n<|assistant|>[f$]\n");
}

TEST_CASE("messages: every assistant turn has a loss, with its end token", "[examples]") {
  Records records(two_turns, plain_turns);
  const auto set = records.open();
  CHECK(set->format() == ExampleFormat::messages);
  CHECK(set->train_on() == TrainOn::assistant);
  CHECK(marked(records) == "<|user|>a$\n<|assistant|>[bc$]\n<|user|>d$\n<|assistant|>[ef$]\n");
  check_lengths(*set);
  records.options.train_on = TrainOn::last_assistant;
  CHECK(marked(records) == "<|user|>a$\n<|assistant|>bc$\n<|user|>d$\n<|assistant|>[ef$]\n");
  records.options.train_on = TrainOn::all;
  CHECK(marked(records).starts_with("<[|user|>a"));
  records.options.train_on = TrainOn::completion;
  CHECK(contains(records.error().text,
                 "train_on: completion does not apply to the format messages; expected assistant"));
  records.options.train_on = TrainOn::automatic;
  records.options.chat_template = "none";
  CHECK(records.error().code == static_cast<int>(Exit::config));
  CHECK(contains(records.error().text, "needs a chat template"));
  CHECK(contains(records.error().text, "chatml, llama3 or zephyr"));
}

TEST_CASE("messages: ShareGPT's spelling, and other keys", "[examples]") {
  Records records(R"({"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "h"},)"
                  R"( {"from": "gpt", "value": "g"}]})"
                  "\n",
                  plain_turns);
  CHECK(marked(records) == "<|system|>s$\n<|user|>h$\n<|assistant|>[g$]\n");
  CHECK(contains(records.open()->notes()[0], "has \"conversations\""));
  Records other(R"({"chat": [{"role": "user", "content": "h"}, {"role": "assistant", "content": "g"}]})"
                "\n",
                plain_turns);
  other.options.chat_key = "chat";
  CHECK(marked(other) == "<|user|>h$\n<|assistant|>[g$]\n");
  other.options.chat_key.clear();
  CHECK(contains(other.error().text,
                 "data.jsonl:1:1: the format is not clear: the record has the fields chat"));
  other.options.format = ExampleFormat::messages;
  CHECK(contains(other.error().text,
                 "data.jsonl:1:1: no messages under \"messages\": the record has the fields chat. Fix: set "
                 "data.chat_key"));
  Records unknown("{\"conversations\": [{\"from\": \"bard\", \"value\": \"h\"}]}\n", plain_turns);
  CHECK(
      contains(unknown.error().text, "data.jsonl:1:29: \"from\": \"bard\" is no role; expected human, user"));
}

TEST_CASE("preference: pairs of TRL, chosen first, with a margin", "[examples]") {
  Records records(R"({"prompt": "p", "chosen": "good", "rejected": "bad", "margin": 1.5})"
                  "\n"
                  R"({"prompt": "q", "chosen": "x", "rejected": "y"})"
                  "\n");
  const auto set = records.open();
  REQUIRE(set->size() == 2);
  REQUIRE(set->sequences_per_example() == 2);
  CHECK(set->format() == ExampleFormat::preference);
  CHECK(set->train_on() == TrainOn::completion);
  CHECK(marked(*set, *records.tokenizer, 0, 0) == "p[good$]");
  CHECK(marked(*set, *records.tokenizer, 0, 1) == "p[bad$]");
  CHECK(marked(*set, *records.tokenizer, 1, 1) == "q[y$]");
  CHECK(set->value(0, ExampleValue::margin) == 1.5);
  CHECK(set->value(1, ExampleValue::margin) == 0);
  CHECK(set->columns() == ExampleColumns{.values = {true, false, false}});
  check_lengths(*set);
  records.options.chat_template = plain_turns;
  CHECK(marked(records, 0, 1) == "<|user|>p$\n<|assistant|>[bad$]\n");
}

TEST_CASE("preference: the prompt is the common beginning of the messages", "[examples]") {
  Records records(R"({"chosen": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"},)"
                  R"( {"role": "user", "content": "v"}, {"role": "assistant", "content": "good"}],)"
                  R"( "rejected": [{"role": "user", "content": "u"}, {"content": "a", "role": "assistant"},)"
                  R"( {"role": "user", "content": "v"}, {"role": "assistant", "content": "goofy"}]})"
                  "\n",
                  plain_turns);
  // The second messages are equal but for the order of their fields.
  CHECK(marked(records, 0, 0) == "<|user|>u$\n<|assistant|>a$\n<|user|>v$\n<|assistant|>[good$]\n");
  CHECK(marked(records, 0, 1) == "<|user|>u$\n<|assistant|>a$\n<|user|>v$\n<|assistant|>[goofy$]\n");
}

TEST_CASE("preference: NeMo's ranked completions give the best and the worst", "[examples]") {
  Records records(R"({"context": [{"role": "user", "content": "u"}], "completions": [)"
                  R"({"rank": 1, "completion": [{"role": "assistant", "content": "middle"}]},)"
                  R"({"rank": 2, "completion": [{"role": "assistant", "content": "worst"}]},)"
                  R"({"rank": 0, "completion": [{"role": "assistant", "content": "best"}]}]})"
                  "\n",
                  plain_turns);
  CHECK(marked(records, 0, 0) == "<|user|>u$\n<|assistant|>[best$]\n");
  CHECK(marked(records, 0, 1) == "<|user|>u$\n<|assistant|>[worst$]\n");
}

TEST_CASE("overlong sequences are truncated, dropped or refused", "[examples]") {
  Records records(
      "{\"prompt\": \"ab\", \"completion\": \"cdefg\"}\n"
      "{\"prompt\": \"ab\", \"completion\": \"cde\"}\n"
      "{\"prompt\": \"ab\", \"completion\": \"cdef\"}\n");
  records.options.max_length = 6;
  {
    const auto set = records.open();
    REQUIRE(set->size() == 3);
    CHECK(marked(*set, *records.tokenizer, 0) == "ab[cdef]");
    CHECK(marked(*set, *records.tokenizer, 1) == "ab[cde$]");
    CHECK(marked(*set, *records.tokenizer, 2) == "ab[cdef]");
    CHECK(set->counts().truncated.count == 2);
    CHECK(set->counts().end_lost.count == 2);
    CHECK(set->counts().no_end_token.count == 0);
    REQUIRE(set->counts().truncated.places.size() == 2);
    CHECK(set->where(set->counts().truncated.places[1]) == records.dir / "data.jsonl:3");
  }
  records.options.on_overlong = OnOverlong::drop;
  {
    const auto set = records.open();
    REQUIRE(set->size() == 1);
    CHECK(marked(*set, *records.tokenizer, 0) == "ab[cde$]");
    CHECK(set->source_row(0) == 1);
    CHECK(set->counts().dropped.count == 2);
    CHECK(set->counts().records == 3);
  }
  records.options.on_overlong = OnOverlong::error;
  CHECK(contains(records.error().text, "data.jsonl:1: 8 tokens, more than the 6 of the context"));
  CHECK(records.error().code == static_cast<int>(Exit::data));

  records.options.on_overlong = OnOverlong::truncate;
  records.options.max_length = 2;
  CHECK(contains(records.error().text, "data.jsonl:1: its prompt has 2 tokens, so that truncation to the 2"));
  records.options.max_length = 3;
  CHECK(marked(records) == "ab[c]");
}

TEST_CASE("the last end token is not lost with the newline after it", "[examples]") {
  Records records(two_turns, plain_turns);
  const std::string all = marked(records);
  records.options.max_length = static_cast<int64_t>(records.open()->ids(0, 0).size()) - 1;
  const auto set = records.open();
  CHECK(marked(*set, *records.tokenizer, 0) + "\n" == all);
  CHECK(set->counts().truncated.count == 1);
  CHECK(set->counts().end_lost.count == 0);
}

TEST_CASE("both sequences of a pair have the same limit", "[examples]") {
  Records records("{\"prompt\": \"ab\", \"chosen\": \"cdefg\", \"rejected\": \"hi\"}\n");
  records.options.max_length = 5;
  const auto set = records.open();
  CHECK(marked(*set, *records.tokenizer, 0, 0) == "ab[cde]");
  CHECK(marked(*set, *records.tokenizer, 0, 1) == "ab[hi$]");
  CHECK(set->counts().truncated.count == 1);
  CHECK(set->counts().end_lost.count == 1);
  records.options.on_overlong = OnOverlong::drop;
  const Caught none = records.error();
  CHECK(none.code == static_cast<int>(Exit::data));
  CHECK(contains(none.text, "no examples in 1 record: 1 too long"));
}

TEST_CASE("bad records are refused with file, line and fix, or left out on request", "[examples]") {
  struct Bad {
    const char *record, *message;
  };
  constexpr Bad messages[] = {
      {"{\"messages\": [", "data.jsonl:2:"},
      {"[1]", "data.jsonl:2: expected a JSON object, found an array"},
      {"{\"messages\": {}}", "data.jsonl:2:14: \"messages\" must be a list of messages, not an object"},
      {"{\"messages\": []}", "data.jsonl:2:14: \"messages\" is empty"},
      {"{\"messages\": [\"a\"]}", "a message must be an object, not a string"},
      {"{\"messages\": [{\"content\": \"a\"}]}", "a message without \"role\": it has the fields content"},
      {"{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}",
       "data.jsonl:2:14: no message of the role assistant"},
      {"{\"messages\": [{\"role\": \"user\"}]}", "a message of the role \"user\" without \"content\""},
      {"{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": "
       "\"\"}]}",
       "data.jsonl:2:49: an assistant message is empty: it has neither content nor tool_calls"},
      {"{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"image\"}]}]}",
       "a part of type \"image\"; expected text"},
      {"{\"messages\": [{\"role\": \"user\", \"content\": 7}]}",
       "\"content\" must be a string or a list of text parts, not an integer"},
      {"{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\"}, {\"role\": \"assistant\", "
       "\"content\": "
       "\"a\"}]}",
       "data.jsonl:2: chat template: turns must alternate"},
      {"{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\"}], \"tools\": 3}",
       "\"tools\" must be a list, not an integer"},
      {"{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\"}], \"tools\": \"[\"}", "tools:1:2:"},
      {"{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\"}], \"chat_template_kwargs\": 3}",
       "\"chat_template_kwargs\" must be an object, not an integer"},
      {"{\"messages\": [{\"role\": \"assistant\", \"content\": \"\xff\"}]}", "data.jsonl:2:"},
  };
  for (const Bad& bad : messages) {
    CAPTURE(bad.record);
    Records records(std::string(two_turns) + bad.record + "\n" + two_turns, plain_turns);
    const Caught caught = records.error();
    CHECK(caught.code == static_cast<int>(Exit::data));
    CHECK(contains(caught.text, bad.message));
    CHECK(caught.text.starts_with("data.jsonl:2:"));
    CHECK(contains(caught.text, "data.on_bad_record: skip"));
    records.options.on_bad_record = OnBadRecord::skip;
    const auto set = records.open();
    CHECK(set->size() == 2);
    CHECK(set->source_row(1) == 2);
    CHECK(set->where(1) == records.dir / "data.jsonl:3");
    CHECK(set->counts().skipped.count == 1);
    CHECK(contains(set->where(set->counts().skipped.places.at(0)), bad.message));
  }
  constexpr Bad pairs[] = {
      {R"({"prompt": "p", "chosen": "a"})",
       "\"rejected\" is missing: the record has the fields prompt, chosen"},
      {R"({"prompt": "p", "chosen": "a", "rejected": ""})", "data.jsonl:1:44: \"rejected\" is empty"},
      {R"({"prompt": "p", "chosen": "a", "rejected": "a"})",
       "the chosen and the rejected completion are equal"},
      {R"({"chosen": "a", "rejected": "b"})", "\"prompt\" is missing; only lists of messages"},
      {R"({"prompt": "p", "chosen": "a", "rejected": 3})",
       "must be a string or a list of messages, not an int"},
      {R"({"prompt": "p", "chosen": "a", "rejected": "b", "margin": "x"})", "margin"},
      {R"({"context": [], "completions": [{"rank": 0, "completion": []}]})", "must be a list of at least 2"},
      {R"({"context": [], "completions": [{"rank": 0}, {"rank": 0}]})", "all completions have the rank 0"},
      {R"({"context": [], "completions": [{"rank": 0}, {"rank": 1}]})",
       "a completion without \"completion\""},
      {R"({"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "user", "content": "b"}]})",
       "no common first message"},
      {R"({"chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],)"
       R"( "rejected": [{"role": "user", "content": "a"}]})",
       "\"rejected\" has no message of the role assistant"},
  };
  for (const Bad& bad : pairs) {
    CAPTURE(bad.record);
    Records records(std::string(bad.record) + "\n", plain_turns);
    records.options.format = ExampleFormat::preference;
    const Caught caught = records.error();
    CHECK(caught.code == static_cast<int>(Exit::data));
    CHECK(contains(caught.text, bad.message));
    CHECK(caught.text.starts_with("data.jsonl:1:"));
  }
  Records prompt("{\"prompt\": \"\", \"completion\": \"x\"}\n");
  CHECK(contains(prompt.error().text, "data.jsonl:1:12: \"prompt\" is empty"));
  Records text("{\"text\": \"\"}\n");
  CHECK(contains(text.error().text, "data.jsonl:1:10: \"text\" is empty"));
  Records list("{\"prompt\": [], \"completion\": \"x\"}\n");
  CHECK(contains(list.error().text, "\"prompt\" is a list of messages, which needs a chat template"));
}

TEST_CASE("ids outside of the model's vocabulary are refused", "[examples]") {
  Records records("{\"text\": \"ab\"}\n");
  records.options.vocab_size = 257;
  CHECK(records.open()->size() == 1);
  records.options.vocab_size = 256;
  CHECK(
      contains(records.error().text, "data.jsonl:1: token 256 is outside of the model's vocabulary of 256"));
}

TEST_CASE("texts of special tokens are counted, refused or dropped", "[examples]") {
  Records records(
      "{\"text\": \"plain\"}\n"
      "{\"text\": \"it says <|endoftext|> here\"}\n");
  CHECK(records.open()->counts().special_text.count == 1);
  records.options.special_tokens_in_text = SpecialTokensInText::drop;
  CHECK(records.open()->size() == 1);
  CHECK(records.open()->counts().special_dropped.count == 1);
  records.options.special_tokens_in_text = SpecialTokensInText::error;
  CHECK(contains(records.error().text, "data.jsonl:2: its text contains the special token <|endoftext|>"));
}

TEST_CASE("options without an effect are refused", "[examples]") {
  Records records("{\"text\": \"ab\"}\n");
  const auto refused = [&](auto change) {
    Records other("{\"text\": \"ab\"}\n");
    change(other.options);
    const Caught caught = other.error();
    CHECK(caught.code == static_cast<int>(Exit::config));
    return caught.text;
  };
  CHECK(contains(refused([](ExampleOptions& o) { o.chat_key = "x"; }), "chat_key: 'x' has no effect"));
  CHECK(
      contains(refused([](ExampleOptions& o) { o.rejected_key = "x"; }), "rejected_key: 'x' has no effect"));
  CHECK(contains(refused([](ExampleOptions& o) { o.chat_template = "chatml"; }), "chat_template: no effect"));
  CHECK(contains(refused([](ExampleOptions& o) { o.prompt_file = "x"; }), "apply to the format instruction"));
  CHECK(contains(refused([](ExampleOptions& o) { o.max_length = 1; }), "max_length is 1"));
  CHECK(
      contains(refused([](ExampleOptions& o) { o.format = ExampleFormat::tokens; }), "token files have no"));
  CHECK(contains(refused([](ExampleOptions& o) { o.template_date = "2026-01-01"; }),
                 "template_date: no effect"));
  CHECK(contains(refused([](ExampleOptions& o) { o.chat_template_kwargs = JsonValue::object(); }),
                 "chat_template_kwargs: no effect"));
}

TEST_CASE("keys of different fields must differ", "[examples]") {
  Records records("{\"prompt\": \"a\", \"completion\": \"b\"}\n");
  records.options.output_key = "prompt";
  CHECK(contains(records.error().text, "input_key and output_key are both 'prompt'"));
  Records pairs("{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\"}\n");
  pairs.options.rejected_key = "chosen";
  CHECK(contains(pairs.error().text, "prompt_key, chosen_key and rejected_key must differ"));
}

TEST_CASE("a JSON list, an empty file and Parquet are refused with a way out", "[examples]") {
  Records list("[{\"text\": \"a\"}]\n", "none", "data.json");
  list.options.format = ExampleFormat::messages;
  list.options.chat_template = plain_turns;
  CHECK(contains(list.error().text, "data.json: not JSON lines"));
  CHECK(contains(list.error().text, "jq -c '.[]'"));
  Records lines("{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\"}]}\n", plain_turns,
                "data.json");
  CHECK(lines.open()->size() == 1);
  Records empty("\n");
  CHECK(contains(empty.error().text, "data.jsonl: no records"));
  Records parquet("PAR1", "none", "data.parquet");
  CHECK(contains(parquet.error().text, "pandas.read_parquet"));
  Records none("");
  none.options.inputs = {none.dir / "missing.jsonl"};
  CHECK(none.error().code == static_cast<int>(Exit::no_input));
}
