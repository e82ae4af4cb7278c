// Records and files that are wrong, at random and on purpose.
#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "apps/data/examples/example_set.h"
#include "tests/catch.h"
#include "tests/data/example_files.h"

using namespace nrl;
using namespace nrl::data;
using namespace nrl::test;

namespace {

const std::vector<std::string> seeds = {
    R"({"text": "abc def"})",
    R"({"prompt": "a", "completion": "bc"})",
    R"({"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]})",
    R"({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "a"}]},)"
    R"( {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},)"
    R"( {"role": "tool", "content": "r"}, {"role": "assistant", "content": "é"}], "tools": [{"a": 1}],)"
    R"( "chat_template_kwargs": {"k": true}})",
    R"({"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]})",
    R"({"prompt": "p", "chosen": "c", "rejected": "r", "margin": 0.5})",
    R"({"chosen": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}],)"
    R"( "rejected": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "b"}]})",
    R"({"context": [{"role": "user", "content": "u"}], "completions": [{"rank": 0, "completion":)"
    R"( [{"role": "assistant", "content": "a"}]}, {"rank": 1, "completion": [{"role": "assistant", "content": "b"}]}]})",
    R"({"prompt_ids": [97, 98], "completion_ids": [99, 256], "reward": 0.5, "advantage": -1, "group": 7,)"
    R"( "logprobs": [-0.5, -0.25], "old_logprobs": [-1, -2]})",
    R"({"prompt": "ab", "completion_ids": [99, 256], "topk_ids": [[1, 2], [3, 4]], "group": "g",)"
    R"( "topk_logprobs": [[-0.5, -1], [-2, -3.5]]})",
    R"({"prompt": "p", "completion": "c", "advantage": 2, "logprobs": [-1, -2]})"};

// The numbers of an example are finite and as many as its tokens.
void check_numbers(const ExampleSet& set, int64_t example) {
  const ExampleColumns columns = set.columns();
  const SequenceLength length = set.length(example, 0);
  const auto finite = [](std::span<const float> numbers) {
    return std::all_of(numbers.begin(), numbers.end(), [](float number) { return std::isfinite(number); });
  };
  for (const ExampleValue value : {ExampleValue::margin, ExampleValue::reward, ExampleValue::advantage})
    CHECK(std::isfinite(set.value(example, value)));
  for (const TokenLogProbs kind : {TokenLogProbs::sampler, TokenLogProbs::old}) {
    const auto log_probs = set.log_probs(example, kind);
    CHECK(log_probs.size() == (columns.has(kind) ? static_cast<size_t>(length.tokens) : 0));
    CHECK(finite(log_probs));
  }
  const auto rows = static_cast<size_t>(length.loss_tokens) * static_cast<size_t>(columns.top_k);
  CHECK(set.top_ids(example).size() == rows);
  CHECK(set.top_log_probs(example).size() == rows);
  CHECK(finite(set.top_log_probs(example)));
}

}  // namespace

TEST_CASE("mutated records are used or refused with file and line", "[examples][fuzz]") {
  int used = 0, refused = 0;
  for (int i = 0; i < fuzz_iterations() / 10; ++i) {
    const std::string& seed = seeds[static_cast<size_t>(i) % seeds.size()];
    const std::string line = mutated(seed, static_cast<uint64_t>(i), 77);
    CAPTURE(line);
    Records records(seed + "\n" + line + "\n", i % 3 == 0 ? "none" : plain_turns);
    records.options.max_length = 40 + i % 100;
    if (i % 5 == 0) records.options.on_bad_record = OnBadRecord::skip;
    try {
      const auto set = records.open(1);
      ++used;
      for (int64_t e = 0; e < set->size(); ++e)
        for (int s = 0; s < set->sequences_per_example(); ++s) {
          const SequenceLength length = set->length(e, s);
          CHECK(length.tokens <= records.options.max_length);
          CHECK(length.loss_tokens > 0);
          CHECK(length.loss_tokens < length.tokens);
          check_numbers(*set, e);
        }
    } catch (const Error& e) {
      ++refused;
      const std::string text = e.what();
      const bool known = e.code() == Exit::config || (e.code() == Exit::data && contains(text, "data.jsonl"));
      CHECK(known);
    }
  }
  CHECK(used > fuzz_iterations() / 100);
  CHECK(refused > fuzz_iterations() / 100);
}

TEST_CASE("records that would use much memory are refused", "[examples]") {
  // Many values in little text.
  std::string values = "{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\", \"x\": [";
  for (int i = 0; i < 1100000; ++i) values += "1,";
  const Records many(values + "1]}]}\n", plain_turns);
  CHECK(contains(many.error().text, "more than 1048576 values"));
  const Records deep(std::string(100000, '[') + "\n", plain_turns);
  CHECK(contains(deep.error().text, "nested deeper than 64"));
  Records large("{\"text\": \"" + std::string((17 << 20), 'a') + "\"}\n");
  CHECK(contains(large.error().text,
                 "data.jsonl:1: the record has 17.0 MiB of text; expected at most 16.0 MiB"));
  large.options.on_bad_record = OnBadRecord::skip;
  CHECK(contains(large.error().text, "no examples"));
}
