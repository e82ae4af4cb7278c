// Examples and counts as users read them.
#include <string>

#include "apps/data/examples/show.h"
#include "tests/catch.h"
#include "tests/data/example_files.h"

using namespace nrl;
using namespace nrl::data;
using namespace nrl::test;

namespace {

constexpr const char* chat =
    R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\u001b[2Jc"}]})"
    "\n";

std::string without_directory(std::string text, const Records& records) {
  for (size_t at; (at = text.find(records.dir.path() + "/")) != std::string::npos;)
    text.erase(at, records.dir.path().size() + 1);
  return text;
}

}  // namespace

TEST_CASE("show: loss tokens are in brackets or green, and nothing reaches the terminal as a command",
          "[examples][show]") {
  const Records records(chat, plain_turns);
  const auto set = records.open();
  CHECK(without_directory(example_text(*set, *records.tokenizer, 0, {}), records) ==
        "example 0  data.jsonl:1  32 tokens, 7 with loss\n"
        "<|user|>a<|endoftext|>\n<|assistant|>[b\\x1b[2Jc<|endoftext|>]\n\n");
  CHECK(without_directory(example_text(*set, *records.tokenizer, 0, {.color = true}), records) ==
        "example 0  data.jsonl:1  32 tokens, 7 with loss\n"
        "<|user|>a\x1b[7m<|endoftext|>\x1b[0m\n<|assistant|>\x1b[32mb\\x1b[2Jc\x1b[0m"
        "\x1b[32m\x1b[7m<|endoftext|>\x1b[0m\n\n");
}

TEST_CASE("show: a part that does not end is marked", "[examples][show]") {
  Records records("{\"prompt\": \"p\", \"completion\": \"cd\"}\n");
  records.options.add_eos = false;
  auto set = records.open();
  CHECK(contains(example_text(*set, *records.tokenizer, 0, {}), "\np[cd\u2403]\n"));
  CHECK(contains(example_text(*set, *records.tokenizer, 0, {.color = true}),
                 "cd\x1b[0m\x1b[31m\u2403\x1b[0m\n"));
  REQUIRE(set_warnings(*set).size() == 1);
  CHECK(contains(set_warnings(*set)[0], "no end token is trained in 1 of 1 example"));
  records.options.add_eos = true;
  set = records.open();
  CHECK(contains(example_text(*set, *records.tokenizer, 0, {.ids = true}),
                 "\np[cd<|endoftext|>]\nids 112 99* 100* 256*\n"));
  CHECK(set_warnings(*set).empty());
}

TEST_CASE("show: a character that is divided between parts is escaped", "[examples][show]") {
  Records records("{\"text\": \"\\u00e9\"}\n");
  // The first byte is not predicted.
  CHECK(contains(example_text(*records.open(), *records.tokenizer, 0, {}), "\n\\xc3[\\xa9<|endoftext|>]\n"));
}

TEST_CASE("show: the summary has counts, lengths and the first places", "[examples][show]") {
  std::string lines;
  for (int i = 1; i <= 10; ++i)
    lines += fmt::format("{{\"prompt\": \"p\", \"completion\": \"{}\"}}\n",
                         std::string(static_cast<size_t>(i), 'x'));
  Records records(lines + "{}\n" + "{\"prompt\": \"p\", \"completion\": \"x\"}\n");
  records.options.max_length = 9;
  records.options.on_bad_record = OnBadRecord::skip;
  const auto set = records.open();
  const LengthSummary lengths = summarize_lengths(*set);
  // 3, 4, ..., 9, 9, 9, 9 and 3.
  CHECK(lengths.p50 == 7);
  CHECK(lengths.p90 == 9);
  CHECK(lengths.max == 9);
  CHECK(
      without_directory(set_text(*set), records) ==
      "format: instruction (data.jsonl:1 has \"prompt\", \"completion\")\n"
      "train_on: completion\n"
      "12 records -> 11 examples, 72 tokens, 84.7 % with loss\n"
      "tokens of a sequence: p50 7, p90 9, max 9\n"
      "3 truncated to the longest length allowed\n  data.jsonl:8\n  data.jsonl:9\n  data.jsonl:10\n"
      "3 of them without their last end token\n  data.jsonl:8\n  data.jsonl:9\n  data.jsonl:10\n"
      "1 left out: bad records\n  data.jsonl:11:1: \"prompt\" is missing: the record has no fields. Fix: set "
      "data.input_key and data.output_key\n"
      "3 duplicates of other examples\n");
  REQUIRE(set_warnings(*set).size() == 1);
  CHECK(contains(set_warnings(*set)[0], "27.3 % of the examples are truncated"));
  const JsonValue json = set_json(*set);
  CHECK(json.get_int("examples") == 11);
  CHECK(json.get_int("length_p90") == 9);
  CHECK(json.at("truncated").get_int("count") == 3);
  CHECK(contains(json.at("skipped").at("first").items().at(0).as_string(), "data.jsonl:11:1: \"prompt\""));
}

TEST_CASE("show: JSON of a pair", "[examples][show]") {
  Records records("{\"prompt\": \"p\", \"chosen\": \"a\", \"rejected\": \"bc\", \"margin\": 2}\n");
  const JsonValue json = example_json(*records.open(), *records.tokenizer, 0);
  CHECK(json.get_double("margin") == 2);
  CHECK(json.get_int("record") == 0);
  REQUIRE(json.at("sequences").items().size() == 2);
  const JsonValue& rejected = json.at("sequences").items()[1];
  CHECK(rejected.at("tokens").dump() == "[112,98,99,256]");
  CHECK(rejected.at("loss").dump() == "[0,1,1,1]");
  CHECK(rejected.at("parts").dump() ==
        R"([{"text":"p","loss":false,"special":false},{"text":"bc","loss":true,"special":false},)"
        R"({"text":"<|endoftext|>","loss":true,"special":true}])");
}

TEST_CASE("show: the numbers of rollouts and of their groups", "[examples][show][rollouts]") {
  Records records(
      R"({"prompt_ids": [97], "completion_ids": [98, 256], "reward": 0.5, "advantage": -1.25, "group": 1,)"
      R"( "logprobs": [-0.5, -0.25], "old_logprobs": [-1, -2], "topk_ids": [[1, 2], [3, 4]],)"
      R"( "topk_logprobs": [[-1, -1], [-1, -1]]})"
      "\n"
      R"({"prompt_ids": [97], "completion_ids": [98], "reward": 1.5, "advantage": 2, "group": 1,)"
      R"( "logprobs": [-0.5], "old_logprobs": [-1], "topk_ids": [[1, 2]], "topk_logprobs": [[-1, -1]]})"
      "\n"
      R"({"prompt_ids": [97], "completion_ids": [99], "reward": -0.5, "advantage": 0, "group": 2,)"
      R"( "logprobs": [-0.5], "old_logprobs": [-1], "topk_ids": [[1, 2]], "topk_logprobs": [[-1, -1]]})"
      "\n");
  const auto set = records.open();
  CHECK(without_directory(example_text(*set, *records.tokenizer, 0, {}), records) ==
        "example 0  data.jsonl:1  3 tokens, 2 with loss, reward 0.5, advantage -1.25, group 0, mean logprob "
        "-0.375, mean old logprob -1.5, top k 2\na[b<|endoftext|>]\n");
  CHECK(contains(example_text(*set, *records.tokenizer, 2, {}), ", reward -0.5, advantage 0, group 1, "));
  CHECK(contains(set_text(*set), "\n2 groups of 1 to 2, mean reward 0.5\n"));
  CHECK(set_warnings(*set).empty());
  const JsonValue json = example_json(*set, *records.tokenizer, 0);
  CHECK(json.get_double("reward") == 0.5);
  CHECK(json.get_double("advantage") == -1.25);
  CHECK(json.get_int("group") == 0);
  CHECK(json.get_double("mean_logprob") == -0.375);
  CHECK(json.get_double("mean_old_logprob") == -1.5);
  CHECK(json.get_int("top_k") == 2);
  CHECK_FALSE(json.contains("margin"));
  const JsonValue summary = set_json(*set);
  CHECK(summary.get_int("groups") == 2);
  CHECK(summary.get_int("smallest_group") == 1);
  CHECK(summary.get_int("largest_group") == 2);
  CHECK(summary.get_double("mean_reward") == 0.5);
}

TEST_CASE("show: a margin is printed", "[examples][show]") {
  Records records(
      "{\"prompt\": \"p\", \"chosen\": \"a\", \"rejected\": \"bc\", \"margin\": 2.5}\n"
      "{\"prompt\": \"p\", \"chosen\": \"a\", \"rejected\": \"bd\"}\n");
  const auto set = records.open();
  CHECK(contains(example_text(*set, *records.tokenizer, 0, {}), "3 tokens, 2 with loss, margin 2.5\n"));
  CHECK_FALSE(contains(example_text(*set, *records.tokenizer, 1, {}), "margin"));
}
