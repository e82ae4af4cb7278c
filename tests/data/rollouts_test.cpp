// Rollouts: sampled completions with rewards, log-probabilities and groups, and a teacher's most probable
// tokens.
#include <string>
#include <vector>

#include "apps/data/examples/example_set.h"
#include "tests/catch.h"
#include "tests/data/example_files.h"

using namespace nrl;
using namespace nrl::data;
using namespace nrl::test;

namespace {

template <class T>
std::vector<T> list(std::span<const T> numbers) {
  return {numbers.begin(), numbers.end()};
}

struct Rollouts : Records {
  explicit Rollouts(const std::string& lines, const std::string& chat_template = "none")
      : Records(lines, chat_template) {
    options.format = ExampleFormat::rollouts;
  }
};

constexpr const char* ids_only = R"({"prompt_ids": [97], "completion_ids": [98, 256]})"
                                 "\n";

}  // namespace

TEST_CASE("rollouts: ids are taken as they are, with all numbers", "[examples][rollouts]") {
  const Rollouts records(
      R"({"prompt_ids": [97, 256, 98], "completion_ids": [99, 100], "reward": 1, "advantage": -0.75, "group": "a",)"
      R"( "logprobs": [-0.5, -1.25], "old_logprobs": [-0.625, -1e-3], "other": [1],)"
      R"( "topk_ids": [[5, 0, 256], [7, 8, 9]], "topk_logprobs": [[-0.1, -3, -4], [0, -50, -60.5]]})"
      "\n"
      R"({"prompt_ids": [97], "completion_ids": [256], "reward": -1e300, "advantage": 2, "group": "a",)"
      R"( "logprobs": [-2], "old_logprobs": [0], "completion": "not read", "prompt": "not read",)"
      R"( "topk_ids": [[1, 2, 3]], "topk_logprobs": [[-1, -2, -3]]})"
      "\n");
  const auto set = records.open();
  CHECK(set->format() == ExampleFormat::rollouts);
  CHECK(set->train_on() == TrainOn::completion);
  REQUIRE(set->size() == 2);
  CHECK(set->sequences_per_example() == 1);
  CHECK(set->columns() ==
        ExampleColumns{.values = {false, true, true}, .log_probs = {true, true}, .groups = true, .top_k = 3});
  CHECK(marked(*set, *records.tokenizer, 0) == "a$b[cd]");
  CHECK(marked(*set, *records.tokenizer, 1) == "a[$]");
  CHECK(set->value(0, ExampleValue::reward) == 1);
  CHECK(set->value(1, ExampleValue::reward) == -1e300);
  CHECK(set->value(0, ExampleValue::advantage) == -0.75);
  CHECK(set->value(1, ExampleValue::advantage) == 2);
  CHECK(set->value(0, ExampleValue::margin) == 0);
  using Floats = std::vector<float>;
  CHECK(list(set->log_probs(0, TokenLogProbs::sampler)) == Floats{0, 0, 0, -0.5f, -1.25f});
  CHECK(list(set->log_probs(0, TokenLogProbs::old)) == Floats{0, 0, 0, -0.625f, -1e-3f});
  CHECK(list(set->log_probs(1, TokenLogProbs::sampler)) == Floats{0, -2});
  CHECK(list(set->log_probs(1, TokenLogProbs::old)) == Floats{0, 0});
  CHECK(list(set->top_ids(0)) == std::vector<int32_t>{5, 0, 256, 7, 8, 9});
  CHECK(list(set->top_ids(1)) == std::vector<int32_t>{1, 2, 3});
  CHECK(list(set->top_log_probs(0)) == Floats{-0.1f, -3, -4, 0, -50, -60.5f});
  CHECK(list(set->top_log_probs(1)) == Floats{-1, -2, -3});
  CHECK(set->group(0) == 0);
  CHECK(set->group(1) == 0);
  CHECK(set->counts().no_end_token.count == 1);
}

TEST_CASE("rollouts: numbers are optional, but the same in all records", "[examples][rollouts]") {
  const Rollouts none(ids_only);
  const auto set = none.open();
  CHECK(set->columns() == ExampleColumns{.groups = true});
  CHECK(set->value(0, ExampleValue::reward) == 0);
  CHECK(set->log_probs(0, TokenLogProbs::sampler).empty());
  CHECK(set->top_ids(0).empty());
  CHECK(set->top_log_probs(0).empty());

  struct Different {
    const char *first, *second, *message;
  };
  constexpr Different cases[] = {
      {R"("reward": 1)", R"("reward": null)",
       "\"reward\" is missing, data.jsonl:1 has it; expected the same numbers in all records"},
      {R"("other": 1)", R"("reward": 1)", "\"reward\" is given, data.jsonl:1 has none"},
      {R"("reward": 1)", R"("reward": 1, "advantage": 1)", "\"advantage\" is given"},
      {R"("logprobs": [-1, -1])", R"("old_logprobs": [-1, -1])", "\"logprobs\" is missing"},
      {R"("reward": 1)", R"("reward": 1, "old_logprobs": [-1, -1])", "\"old_logprobs\" is given"},
      {R"("topk_ids": [[1], [2]], "topk_logprobs": [[-1], [-2]])", R"("other": 1)",
       "\"topk_ids\" is missing"},
      {R"("topk_ids": [[1], [2]], "topk_logprobs": [[-1], [-2]])",
       R"("topk_ids": [[1, 2], [3, 4]], "topk_logprobs": [[-1, -2], [-3, -4]])",
       "\"topk_ids\" has 2 ids for each token, data.jsonl:1 has 1; expected the same number in all records"},
  };
  const auto record = [](const char* numbers) {
    return std::string(R"({"prompt_ids": [97], "completion_ids": [98, 256], )") + numbers + "}\n";
  };
  for (const Different& c : cases) {
    CAPTURE(c.first, c.second);
    Rollouts records(record(c.first) + record(c.first) + record(c.second) + record(c.first));
    Caught caught = error_of([&] { (void)records.open(); });
    CHECK(caught.code == static_cast<int>(Exit::data));
    for (size_t at; (at = caught.text.find(records.dir.path() + "/")) != std::string::npos;)
      caught.text.erase(at, records.dir.path().size() + 1);
    CHECK(caught.text.starts_with("data.jsonl:3: "));
    CHECK(contains(caught.text, c.message));
    records.options.on_bad_record = OnBadRecord::skip;
    CHECK(records.open()->size() == 3);
    CHECK(records.open()->source_row(2) == 3);
  }
}

TEST_CASE("rollouts: the first record that can be read says which numbers there are",
          "[examples][rollouts]") {
  Rollouts records(
      "{\n"
      R"({"prompt_ids": [97], "completion_ids": [98], "reward": 1})"
      "\n" +
      std::string(ids_only));
  records.options.on_bad_record = OnBadRecord::skip;
  const auto set = records.open();
  CHECK(set->size() == 1);
  CHECK(set->columns().has(ExampleValue::reward));
  CHECK(set->counts().skipped.count == 2);
  records.options.on_bad_record = OnBadRecord::error;
  CHECK(records.error().text.starts_with("data.jsonl:1:"));
}

TEST_CASE("rollouts: consecutive records with the same group are one", "[examples][rollouts]") {
  const auto groups = [](const std::vector<std::string>& names) {
    std::string lines;
    for (const std::string& name : names)
      lines += R"({"prompt_ids": [97], "completion_ids": [98])" +
               (name.empty() ? "" : ", \"group\": " + name) + "}\n";
    const Rollouts records(lines);
    const auto set = records.open();
    std::vector<int64_t> numbers;
    for (int64_t i = 0; i < set->size(); ++i) numbers.push_back(set->group(i));
    return numbers;
  };
  using Numbers = std::vector<int64_t>;
  CHECK(groups({"1", "1", "2", "2", "2"}) == Numbers{0, 0, 1, 1, 1});
  // A number is not the string; a name may come again; without one there is no group.
  CHECK(groups({"1", "\"1\"", "1", "\"\"", "\"\"", "null"}) == Numbers{0, 1, 2, 3, 3, 4});
  CHECK(groups({"", "", "\"x\"", "\"x\"", "", "\"x\""}) == Numbers{0, 1, 2, 2, 3, 4});
}

TEST_CASE("rollouts: records that are left out separate groups all the same", "[examples][rollouts]") {
  std::string lines;
  const char* completions[] = {"1, 2", "1, 2, 3", "1, 2", "1, 2, 3", "1, 2, 3", "1, 2"};
  const char* groups[] = {"7", "7", "7", "8", "8", "7"};
  for (int i = 0; i < 6; ++i)
    lines += fmt::format("{{\"prompt_ids\": [97], \"completion_ids\": [{}], \"group\": {}}}\n",
                         completions[i], groups[i]);
  Rollouts records(lines);
  records.options.max_length = 3;
  records.options.on_overlong = OnOverlong::drop;
  const auto set = records.open();
  REQUIRE(set->size() == 3);
  CHECK(set->group(0) == 0);
  CHECK(set->group(1) == 0);
  CHECK(set->group(2) == 1);
}

TEST_CASE("rollouts: truncation and its rules apply to the numbers of tokens", "[examples][rollouts]") {
  Rollouts records(
      R"({"prompt_ids": [97, 98], "completion_ids": [99, 100, 101], "reward": 3, "logprobs": [-1, -2, -3],)"
      R"( "topk_ids": [[1, 2], [3, 4], [5, 6]], "topk_logprobs": [[-1, -2], [-3, -4], [-5, -6]]})"
      "\n"
      R"({"prompt_ids": [97], "completion_ids": [102], "reward": 4, "logprobs": [-4],)"
      R"( "topk_ids": [[7, 8]], "topk_logprobs": [[-7, -8]]})"
      "\n");
  records.options.max_length = 4;
  auto set = records.open();
  REQUIRE(set->size() == 2);
  CHECK(set->counts().truncated.count == 1);
  CHECK(list(set->log_probs(0, TokenLogProbs::sampler)) == std::vector<float>{0, 0, -1, -2});
  CHECK(list(set->top_ids(0)) == std::vector<int32_t>{1, 2, 3, 4});
  CHECK(list(set->top_log_probs(0)) == std::vector<float>{-1, -2, -3, -4});
  CHECK(list(set->log_probs(1, TokenLogProbs::sampler)) == std::vector<float>{0, -4});
  CHECK(list(set->top_ids(1)) == std::vector<int32_t>{7, 8});
  records.options.on_overlong = OnOverlong::drop;
  set = records.open();
  REQUIRE(set->size() == 1);
  CHECK(set->value(0, ExampleValue::reward) == 4);
  CHECK(list(set->log_probs(0, TokenLogProbs::sampler)) == std::vector<float>{0, -4});
  CHECK(list(set->top_log_probs(0)) == std::vector<float>{-7, -8});
  records.options.on_overlong = OnOverlong::truncate;
  records.options.max_length = 2;
  CHECK(contains(records.error().text, "data.jsonl:1: its prompt has 2 tokens"));
}

TEST_CASE("rollouts: texts are tokenized as instructions", "[examples][rollouts]") {
  Rollouts records(R"({"prompt": "ab", "completion": "cd", "logprobs": [-1, -2, -3]})"
                   "\n");
  {
    const auto set = records.open();
    CHECK(marked(*set, *records.tokenizer, 0) == "ab[cd$]");
    CHECK(list(set->log_probs(0, TokenLogProbs::sampler)) == std::vector<float>{0, 0, -1, -2, -3});
  }
  records.options.add_eos = false;
  CHECK(contains(
      records.error().text,
      "data.jsonl:1: \"logprobs\" is for 3 tokens, the completion has 2 with its end token. Fix: give "
      "\"completion_ids\" instead of a text"));
  Rollouts turns(
      R"({"prompt": [{"role": "user", "content": "u"}], "completion": "cd", "logprobs": [-1, -2, -3]})"
      "\n",
      plain_turns);
  const auto set = turns.open();
  CHECK(marked(*set, *turns.tokenizer, 0) == "<|user|>u$\n<|assistant|>[cd$]\n");
  const auto log_probs = set->log_probs(0, TokenLogProbs::sampler);
  REQUIRE(log_probs.size() == set->ids(0, 0).size());
  CHECK(list(log_probs.subspan(log_probs.size() - 5)) == std::vector<float>{0, -1, -2, -3, 0});
}

TEST_CASE("rollouts: the completion's ids may follow a prompt of text or messages", "[examples][rollouts]") {
  Rollouts records(R"({"prompt": "ab", "completion_ids": [99, 100], "reward": 1, "logprobs": [-1, -2]})"
                   "\n");
  CHECK(marked(records) == "ab[cd]");
  records.options.add_bos = true;
  CHECK(marked(records) == (records.tokenizer->bos() ? "$ab[cd]" : "ab[cd]"));
  Rollouts turns(R"({"prompt": [{"role": "user", "content": "u"}], "completion_ids": [99, 256]})"
                 "\n"
                 R"({"prompt": "v", "completion_ids": [100]})"
                 "\n",
                 plain_turns);
  // The template begins the assistant's turn, and writes nothing after the ids.
  CHECK(marked(turns, 0) == "<|user|>u$\n<|assistant|>[c$]");
  CHECK(marked(turns, 1) == "<|user|>v$\n<|assistant|>[d]");
  CHECK(turns.open()->counts().no_end_token.count == 1);
}

TEST_CASE("rollouts: the format is detected by ids or an advantage", "[examples][rollouts]") {
  const auto detected = [](const char* record) {
    return Records(std::string(record) + "\n").open()->format();
  };
  CHECK(detected(R"({"prompt_ids": [97], "completion_ids": [98]})") == ExampleFormat::rollouts);
  CHECK(detected(R"({"prompt": "a", "completion_ids": [98]})") == ExampleFormat::rollouts);
  CHECK(detected(R"({"prompt": "a", "completion": "b", "advantage": 1})") == ExampleFormat::rollouts);
  CHECK(detected(R"({"prompt": "a", "completion": "b", "reward": 1})") == ExampleFormat::instruction);
}

TEST_CASE("rollouts: bad records are refused with file and line", "[examples][rollouts]") {
  struct Bad {
    const char *fields, *message;
  };
  constexpr Bad numbers[] = {
      {R"("reward": "1")", "\"reward\": expected a number, found a string"},
      {R"("reward": true)", "\"reward\": expected a number, found a boolean"},
      {R"("reward": 1e999)", "data.jsonl:2:"},
      {R"("advantage": [1])", "\"advantage\": expected a number, found an array"},
      {R"("reward": NaN)", "data.jsonl:2:"},
      {R"("reward": -Infinity)", "data.jsonl:2:"},
      {R"("logprobs": -1)", "\"logprobs\" must be a list, not an integer"},
      {R"("logprobs": [])", "\"logprobs\" is for 0 tokens, the completion has 2"},
      {R"("logprobs": [-1])", "\"logprobs\" is for 1 token, the completion has 2"},
      {R"("logprobs": [-1, -1, -1])", "\"logprobs\" is for 3 tokens, the completion has 2"},
      {R"("old_logprobs": [-1, -1, -1])", "\"old_logprobs\" is for 3 tokens, the completion has 2"},
      {R"("logprobs": [-1, null])", "\"logprobs\": expected a number, found null"},
      {R"("logprobs": [-1, -1e39])", "\"logprobs\": -1e+39 is out of range"},
      {R"("logprobs": [-1, 0.5])",
       "\"logprobs\": 0.5 is not the logarithm of a probability; expected at most 0"},
      {R"("group": [1])", "\"group\" must be a string or a number, not an array"},
      {R"("group": 1e999)", "data.jsonl:2:"},
      {R"("topk_ids": [[1], [2]])", "\"topk_ids\" without \"topk_logprobs\""},
      {R"("topk_logprobs": [[-1], [-2]])", "\"topk_logprobs\" without \"topk_ids\""},
      {R"("topk_ids": 1, "topk_logprobs": [])", "\"topk_ids\" must be a list, not an integer"},
      {R"("topk_ids": [], "topk_logprobs": [])", "\"topk_ids\" is empty"},
      {R"("topk_ids": [[]], "topk_logprobs": [[]])",
       "\"topk_ids\" has 0 ids for a token; expected 1 to 16384"},
      {R"("topk_ids": [[1], [2]], "topk_logprobs": [[-1]])",
       "\"topk_logprobs\" has 1 tokens, \"topk_ids\" has 2"},
      {R"("topk_ids": [[1]], "topk_logprobs": [[-1]])", "\"topk_ids\" is for 1 token, the completion has 2"},
      {R"("topk_ids": [[1], [2, 3]], "topk_logprobs": [[-1], [-2, -3]])",
       "\"topk_ids\" has 2 for this token; expected 1, as for the first one"},
      {R"("topk_ids": [[1], [2]], "topk_logprobs": [[-1], [-2, -3]])",
       "\"topk_logprobs\" has 2 for this token; expected 1, as for the first one"},
      {R"("topk_ids": [[1], 2], "topk_logprobs": [[-1], [-2]])",
       "\"topk_ids\" must be a list, not an integer"},
      {R"("topk_ids": [[1], [-2]], "topk_logprobs": [[-1], [-2]])", "\"topk_ids\": -2 is no token id"},
      {R"("topk_ids": [[1], [257]], "topk_logprobs": [[-1], [-2]])",
       "token 257 is outside of the model's vocabulary of 257 (\"topk_ids\")"},
      {R"("topk_ids": [[1, 2], [3, 3]], "topk_logprobs": [[-1, -2], [-1, -2]])",
       "\"topk_ids\": the id 3 is there twice"},
      {R"("topk_ids": [[1], [2]], "topk_logprobs": [[-1], [2]])",
       "\"topk_logprobs\": 2 is not the logarithm of a probability"},
  };
  const auto check = [](const std::string& record, const char* message) {
    CAPTURE(record);
    const Rollouts records(std::string("\n") + record + "\n");
    const Caught caught = records.error();
    CHECK(caught.code == static_cast<int>(Exit::data));
    CHECK(contains(caught.text, message));
    CHECK(caught.text.starts_with("data.jsonl:2:"));
    CHECK(contains(caught.text, "data.on_bad_record: skip"));
  };
  for (const Bad& bad : numbers)
    check(std::string(R"({"prompt_ids": [97], "completion_ids": [98, 256], )") + bad.fields + "}",
          bad.message);
  constexpr Bad tokens[] = {
      {R"("completion_ids": [1])",
       "neither \"prompt_ids\" nor \"prompt\": the record has the fields completion_ids"},
      {R"("prompt_ids": [1])",
       "neither \"completion_ids\" nor \"completion\": the record has the fields prompt_ids"},
      {R"("prompt_ids": [1], "completion": "a")", "\"prompt_ids\" without \"completion_ids\""},
      {R"("prompt_ids": [], "completion_ids": [1])", "\"prompt_ids\" is empty"},
      {R"("prompt_ids": [1], "completion_ids": [])", "\"completion_ids\" is empty"},
      {R"("prompt_ids": [1], "completion_ids": "a")", "\"completion_ids\" must be a list, not a string"},
      {R"("prompt_ids": [1], "completion_ids": [1.5])",
       "\"completion_ids\": expected a token id, found a number"},
      {R"("prompt_ids": [1], "completion_ids": [-1])", "\"completion_ids\": -1 is no token id"},
      {R"("prompt_ids": [2147483648], "completion_ids": [1])", "\"prompt_ids\": 2147483648 is no token id"},
      {R"("prompt_ids": [18446744073709551615], "completion_ids": [1])", "data.jsonl:2:"},
      {R"("prompt_ids": [257], "completion_ids": [1])",
       "token 257 is outside of the model's vocabulary of 257"},
      {R"("prompt": "", "completion_ids": [1])", "\"prompt\" is empty"},
      {R"("prompt": 7, "completion_ids": [1])", "\"prompt\" must be a string or a list of messages"},
      {R"("prompt": [], "completion_ids": [1])",
       "\"prompt\" is a list of messages, which needs a chat template"},
      {R"("prompt": "a", "completion": "")", "\"completion\" is empty"},
  };
  for (const Bad& bad : tokens) check(std::string("{") + bad.fields + "}", bad.message);
}

TEST_CASE("rollouts: ids are checked against the smaller vocabulary", "[examples][rollouts]") {
  Rollouts records(ids_only);
  records.options.vocab_size = 1000;
  CHECK(records.open()->size() == 1);
  records.options.vocab_size = 256;
  CHECK(
      contains(records.error().text, "data.jsonl:1: token 256 is outside of the model's vocabulary of 256"));
}

TEST_CASE("rollouts: options without an effect are refused, keys of texts are not", "[examples][rollouts]") {
  Rollouts records(R"({"q": "a", "a": "b", "reward": 1})"
                   "\n");
  records.options.input_key = "q";
  records.options.output_key = "a";
  CHECK(marked(records) == "a[b$]");
  records.options.output_key = "q";
  CHECK(contains(records.error().text, "input_key and output_key are both 'q'"));
  Rollouts all(ids_only);
  all.options.train_on = TrainOn::all;
  CHECK(
      contains(all.error().text, "train_on: all does not apply to the format rollouts; expected completion"));
  Rollouts file(ids_only);
  file.options.prompt_file = "x";
  CHECK(contains(file.error().text, "apply to the format instruction"));
}
