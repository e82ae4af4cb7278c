// Fine-tuning on conversations in this process: packing changes nothing, runs resume in the middle of an
// epoch, bad records and steps are named.
#include <cmath>
#include <fstream>

#include "core/io/atomic_file.h"
#include "tests/catch.h"
#include "tests/train/training_run.h"

using namespace nrl;
using namespace nrl::test;

namespace {

class Conversations : public Workbench {
 public:
  Conversations() {
    write("chat", 21);
    write("few", 3);
    std::ofstream(*this / "chat.jinja") << "{% for m in messages %}{{ m.content }};{% endfor %}";
  }

  void write(const std::string& name, int count, const std::string& last = "") const {
    std::ofstream file(*this / (name + ".jsonl"));
    for (int i = 0; i < count; ++i) {
      const std::string question(static_cast<size_t>(1 + i * 5 % 13), static_cast<char>('a' + i % 26)),
          answer(static_cast<size_t>(2 + i * 7 % 9), static_cast<char>('A' + i % 26));
      file
          << fmt::format(
                 R"({{"messages":[{{"role":"user","content":"{}"}},{{"role":"assistant","content":"{}"}}]}})",
                 question, answer)
          << "\n";
    }
    if (!last.empty()) file << last << "\n";
  }

  Finished tune(const std::string& name, std::vector<std::string> more = {}) const {
    std::vector<std::string> overrides{"algorithm=sft",
                                       "policy.tokenizer.name=bytes",
                                       "policy.tokenizer.chat_template=" + (*this / "chat.jinja"),
                                       "policy.max_total_sequence_length=32",
                                       "policy.train_global_batch_size=4",
                                       "data.train.data_path=" + (*this / "chat.jsonl"),
                                       "loop.max_num_steps=9"};
    overrides.insert(overrides.end(), more.begin(), more.end());
    return run(name, overrides);
  }

  std::vector<double> losses(const std::string& name, const char* field = "loss") const {
    std::vector<double> out;
    for (const JsonValue& row : rows(name))
      if (const JsonValue* value = row.find(field)) out.push_back(value->as_double());
    return out;
  }
};

}  // namespace

TEST_CASE("losses do not depend on how examples share microbatches", "[sft]") {
  const Conversations bench;
  const std::string validation = "data.validation.data_path=" + (bench / "few.jsonl");
  const auto learn = [&](const std::string& name, std::vector<std::string> more) {
    more.insert(more.end(), {validation, "loop.val_period=4", "policy.train_micro_batch_size=1"});
    const Finished finished = bench.tune(name, more);
    INFO(finished.err);
    REQUIRE(finished.code == Exit::ok);
    std::vector<double> numbers = bench.losses(name);
    CHECK(numbers.size() == 9);
    for (const double loss : bench.losses(name, "val_loss")) numbers.push_back(loss);
    CHECK(numbers.size() == 11);
    for (const double norm : bench.losses(name, "grad_norm")) numbers.push_back(norm);
    return numbers;
  };
  const std::vector<double> want = learn("one", {});
  const std::vector<std::pair<std::string, std::vector<std::string>>> ways{
      {"four", {"policy.train_micro_batch_size=4"}},
      {"packed", {"policy.sequence_packing.enabled=true", "policy.train_micro_batch_size=2"}},
      {"packed-4", {"policy.sequence_packing.enabled=true", "policy.train_micro_batch_size=4"}},
      {"shuffled",
       {"policy.sequence_packing.enabled=true", "policy.sequence_packing.algorithm=first_fit_shuffle"}},
      {"sorted", {"policy.dynamic_batching.enabled=true", "policy.train_micro_batch_size=2"}}};
  for (const auto& [name, keys] : ways) {
    CAPTURE(name);
    const std::vector<double> got = learn(name, keys);
    REQUIRE(got.size() == want.size());
    // Sums in another order: 2e-6 after several updates.
    for (size_t i = 0; i < got.size(); ++i) CHECK(std::fabs(got[i] - want[i]) <= 2e-6 * std::fabs(want[i]));
  }
}

TEST_CASE("a run on packed examples resumes in the middle of an epoch with the same bits", "[sft]") {
  const Conversations bench;
  const std::vector<std::string> packed{"policy.sequence_packing.enabled=true"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), packed.begin(), packed.end());
    return more;
  };
  REQUIRE(bench.tune("whole", with({})).code == Exit::ok);
  for (const int step : {3, 6}) {
    CAPTURE(step);
    const std::string name = fmt::format("parts-{}", step);
    REQUIRE(bench.tune(name, with({fmt::format("loop.max_num_steps={}", step)})).code == Exit::ok);
    REQUIRE(bench.tune(name, with({})).code == Exit::ok);
    CHECK(bench.losses(name) == bench.losses("whole"));
    CHECK(bench.read(name + "/checkpoints/step-9/model.safetensors") ==
          bench.read("whole/checkpoints/step-9/model.safetensors"));
  }
}

TEST_CASE("epochs have every example once", "[sft]") {
  const Conversations bench;
  const auto tokens = [&](const std::string& name, std::vector<std::string> more) {
    more.insert(more.end(), {"loop.max_num_steps=null", "policy.train_global_batch_size=3",
                             "policy.train_micro_batch_size=3"});
    REQUIRE(bench.tune(name, more).code == Exit::ok);
    double sum = 0;
    for (const double valid : bench.losses(name, "global_valid_toks")) sum += valid;
    return sum;
  };
  const double once = tokens("once", {"loop.max_num_epochs=1"});
  CHECK(once > 0);
  CHECK(tokens("other", {"loop.max_num_epochs=1", "data.seed=99"}) == once);
  CHECK(tokens("twice", {"loop.max_num_epochs=2"}) == 2 * once);
}

TEST_CASE("steps on examples that are not finite are skipped, and end the run", "[sft]") {
  const Conversations bench;
  const auto steps = [&](const std::string& name, const std::string& rule) {
    const Finished finished =
        bench.tune(name, {"policy.optimizer.lr=1000", "policy.optimizer.weight_decay=1000",
                          "loop.max_num_steps=20", rule, "policy.max_grad_norm=null"});
    CHECK(finished.code == Exit::diverged);
    return bench.losses(name, "step").size();
  };
  const size_t stopped = steps("stop", "sft.on_nonfinite=stop");
  CHECK(steps("two", "sft.max_nonfinite_steps=2") == stopped + 1);
}

TEST_CASE("a record that is no example, or too large an id, is named", "[sft]") {
  const Conversations bench;
  bench.write("bad", 4, R"({"messages":[{"role":"user","content":"a"}]})");
  const std::string bad = "data.train.data_path=" + (bench / "bad.jsonl");
  const Finished refused = bench.tune("refused", {bad});
  CHECK(refused.code == Exit::data);
  CHECK(contains(refused.err, "bad.jsonl:5:"));
  const Finished skipped = bench.tune("skipped", {bad, "data.on_bad_record=skip"});
  CHECK(skipped.code == Exit::ok);
  CHECK(contains(skipped.err + skipped.out, "1 of 5 records cannot be used and are skipped"));
  bench.write("unclosed", 4, R"({"messages":[)");
  const Finished json = bench.tune("json", {"data.train.data_path=" + (bench / "unclosed.jsonl")});
  CHECK(json.code == Exit::data);
  CHECK(contains(json.err, "unclosed.jsonl:5:"));
  const Finished absent = bench.tune("absent", {"data.train.data_path=" + (bench / "nothing.jsonl")});
  CHECK(absent.code == Exit::no_input);
  CHECK(contains(absent.err, "there is no"));
  const Finished small = bench.tune("small", {"policy.model.vocab_size=90"});
  CHECK(small.code == Exit::data);
  CHECK(contains(small.err, "chat.jsonl:"));
  CHECK(contains(small.err, "vocabulary"));
}

TEST_CASE("examples are refused where they are not supported", "[sft]") {
  const Conversations bench;
  const auto refusal = [&](std::vector<std::string> keys) {
    const Finished finished = bench.tune("refused", keys);
    CHECK(finished.code == Exit::config);
    return finished.err;
  };
  CHECK(contains(refusal({"policy.tokenizer.name=null", "policy.tokenizer.chat_template=default"}),
                 "policy.tokenizer.name must be given"));
  CHECK(contains(refusal({"policy.model.attention_dropout=0.1"}), "dropout of 0.1"));
  CHECK(contains(refusal({"data.train.format=tokens"}), "data.train.format: tokens"));
  CHECK(contains(refusal({"policy.sequence_packing.enabled=true", "policy.dynamic_batching.enabled=true"}),
                 "both say how microbatches are filled"));
  CHECK(contains(
      refusal({"policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=48"}),
      "fits: 32 or 64"));
  CHECK(contains(
      refusal({"policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=32"}),
      "two sizes of a microbatch"));
  CHECK(contains(refusal({"data.template_date=tomorrow"}), "YYYY-MM-DD"));
  CHECK(contains(refusal({"loop.val_at_end=true"}), "give data.validation.data_path"));
}

TEST_CASE("records of the format of another algorithm are refused when they are opened", "[sft]") {
  const Conversations bench;
  std::ofstream(bench / "pairs.jsonl") << R"({"prompt":"a","chosen":"b","rejected":"c"})"
                                       << "\n";
  const Finished pairs = bench.tune("pairs", {"data.train.data_path=" + (bench / "pairs.jsonl")});
  CHECK(pairs.code == Exit::config);
  CHECK(contains(pairs.err, "pairs.jsonl have format preference, but algorithm sft trains on text"));
  const Finished chat = bench.tune("chat", {"algorithm=dpo"});
  CHECK(chat.code == Exit::config);
  CHECK(contains(chat.err, "chat.jsonl have format messages, but algorithm dpo trains on preferences"));
}
