// Distillation from files in this process: the loss falls to what the teacher leaves, layouts and packing
// change nothing, files without a teacher are named.
#include <cmath>
#include <fstream>

#include "apps/train/loop/teacher_numbers.h"
#include "tests/catch.h"
#include "tests/train/training_run.h"

using namespace nrl;
using namespace nrl::test;

namespace {

constexpr int k = 5;

/// Rollouts whose teacher puts most of its probability on the next token of a short cycle.
class Lessons : public Workbench {
 public:
  Lessons() { write("lessons.jsonl", true); }

  void write(const std::string& name, bool teacher) const {
    std::ofstream file(*this / name);
    for (int i = 0; i < 16; ++i) {
      const int tokens = 1 + i % 5;
      std::string completion, ids, log_probs;
      for (int t = 0; t < tokens; ++t) {
        const int next = 65 + (i + t + 1) % 16;
        const char* comma = t ? "," : "";
        completion += fmt::format("{}{}", comma, next);
        ids += fmt::format("{}[{},{},{},{},{}]", comma, next, next + 16, next + 32, next + 48, next + 64);
        log_probs += fmt::format("{}[-0.2,-2,-3,-4,-5]", comma);
      }
      file << fmt::format(R"({{"prompt_ids":[64,{}],"completion_ids":[{}])", 65 + i % 16, completion);
      if (teacher) file << fmt::format(R"(,"topk_ids":[{}],"topk_logprobs":[{}])", ids, log_probs);
      file << "}\n";
    }
  }

  Finished learn(const std::string& name, std::vector<std::string> more = {}) const {
    std::vector<std::string> overrides{"algorithm=distill",
                                       "distill.topk=5",
                                       "policy.tokenizer.name=bytes",
                                       "policy.max_total_sequence_length=16",
                                       "policy.train_global_batch_size=8",
                                       "data.train.data_path=" + (*this / "lessons.jsonl"),
                                       "loop.max_num_steps=60"};
    overrides.insert(overrides.end(), more.begin(), more.end());
    return run(name, overrides);
  }

  std::vector<double> numbers(const std::string& name, const char* field = "loss") const {
    std::vector<double> out;
    for (const JsonValue& row : rows(name))
      if (const JsonValue* value = row.find(field)) out.push_back(value->as_double());
    return out;
  }
};

}  // namespace

TEST_CASE("distillation brings the student to the teacher", "[distill]") {
  const Lessons bench;
  for (const auto& [name, keys] : std::vector<std::pair<std::string, std::vector<std::string>>>{
           {"forward", {}},
           {"reverse", {"distill.kl_type=reverse"}},
           {"mixed", {"distill.kl_type=mixed", "distill.temperature=2"}},
           {"all", {"distill.zero_outside_topk=true"}},
           {"all-reverse", {"distill.zero_outside_topk=true", "distill.kl_type=reverse"}},
           {"fewer", {"distill.topk=2"}}}) {
    CAPTURE(name);
    std::vector<std::string> more = keys;
    more.insert(more.end(), {"data.validation.data_path=" + bench / "lessons.jsonl", "loop.val_at_end=true"});
    const Finished finished = bench.learn(name, more);
    INFO(finished.err);
    REQUIRE(finished.code == Exit::ok);
    const std::vector<double> losses = bench.numbers(name);
    REQUIRE(losses.size() == 60);
    CHECK(losses.front() > 0.1);
    // A divergence from a distribution that the student can have falls to 0.
    CHECK(losses.back() < 0.1 * losses.front());
    REQUIRE(bench.numbers(name, "val_loss").size() == 1);
    CHECK(bench.numbers(name, "val_loss").back() < 0.1 * losses.front());
  }
}

TEST_CASE("the losses of distillation do not depend on packing", "[distill]") {
  const Lessons bench;
  for (const char* const way : {"distill.zero_outside_topk=false", "distill.zero_outside_topk=true"}) {
    const auto learned = [&](std::vector<std::string> more) {
      more.insert(more.end(), {way, "distill.kl_type=mixed", "loop.max_num_steps=5"});
      const Finished finished = bench.learn("run", more);
      INFO(finished.err);
      REQUIRE(finished.code == Exit::ok);
      std::vector<double> all = bench.numbers("run");
      for (const double norm : bench.numbers("run", "grad_norm")) all.push_back(norm);
      std::filesystem::remove_all(bench / "run");
      return all;
    };
    const std::vector<double> want = learned({"policy.train_micro_batch_size=1"});
    REQUIRE(want.size() == 10);
    const std::vector<std::vector<std::string>> ways{
        {"policy.train_micro_batch_size=4"},
        {"policy.sequence_packing.enabled=true", "policy.train_micro_batch_size=2"},
        {"policy.dynamic_batching.enabled=true", "policy.train_micro_batch_size=4"}};
    for (const std::vector<std::string>& keys : ways) {
      CAPTURE(way, keys);
      const std::vector<double> got = learned(keys);
      REQUIRE(got.size() == want.size());
      for (size_t i = 0; i < got.size(); ++i)
        CHECK(std::fabs(got[i] - want[i]) <= 1e-5 * std::fabs(want[i]) + 1e-7);
    }
  }
}

TEST_CASE("distillation refuses files without what it reads", "[distill]") {
  const Lessons bench;
  bench.write("plain.jsonl", false);
  const auto refusal = [&](std::vector<std::string> more) {
    const Finished finished = bench.learn("refused", std::move(more));
    CHECK(finished.code != Exit::ok);
    return finished.err;
  };
  const auto contains = [](const std::string& text, std::string_view part) {
    INFO(text);
    return text.find(part) != std::string::npos;
  };
  CHECK(contains(refusal({"distill.topk=6"}), "have 5 ids of a teacher per token. Fix: distill.topk=5"));
  CHECK(contains(refusal({"data.train.data_path=" + bench / "plain.jsonl"}),
                 "plain.jsonl have no topk_ids and topk_logprobs"));
  CHECK(contains(refusal({"data.validation.data_path=" + bench / "plain.jsonl", "loop.val_at_end=true"}),
                 "data.validation.data_path: the records of"));
  CHECK(contains(refusal({"distill.topk=300"}), "the vocabulary has 272"));
  CHECK(contains(refusal({"data.train.format=messages"}), "algorithm distill trains on rollouts"));
}

namespace {

/// One example of five tokens, the third and the last of which have a loss and four ids.
class FourIds final : public data::Examples {
 public:
  int64_t size() const override { return 1; }
  int sequences_per_example() const override { return 1; }
  data::SequenceLength length(int64_t, int) const override { return {.tokens = 5, .loss_tokens = 2}; }
  std::span<const int32_t> ids(int64_t, int) const override { return tokens_; }
  bool in_loss(int64_t, int, int64_t token) const override { return token == 2 || token == 4; }
  std::string where(int64_t) const override { return "here"; }
  bool rendered() const override { return false; }
  std::string describe() const override { return "four ids"; }
  data::ExampleColumns columns() const override {
    data::ExampleColumns columns;
    columns.top_k = 4;
    return columns;
  }
  std::span<const int32_t> top_ids(int64_t) const override { return top_ids_; }
  std::span<const float> top_log_probs(int64_t) const override { return top_log_probs_; }

 private:
  std::vector<int32_t> tokens_{1, 2, 3, 4, 5}, top_ids_{10, 11, 12, 13, 20, 21, 22, 23};
  std::vector<float> top_log_probs_{-4, -1, -3, -2, -1, -1, -1, -5};
};

}  // namespace

TEST_CASE("the most probable ids are the columns of rows with a loss", "[distill]") {
  const auto batch = [](int64_t topk) {
    data::ExampleBatches batches(std::make_shared<FourIds>(),
                                 {.shuffle = false,
                                  .packing = {.capacity = 6, .row_unit = 6},
                                  .most_rows = 4,
                                  .numbers = train::teacher_numbers(std::make_shared<FourIds>(), topk)});
    batches.begin_step();
    return batches.next();
  };
  const auto floats = [](const std::vector<int32_t>& bits) {
    std::vector<float> out;
    for (const int32_t b : bits) out.push_back(std::bit_cast<float>(b));
    return out;
  };
  using Ids = std::vector<int32_t>;
  const data::HostMicroBatch two = batch(2);
  CHECK(two.targets == Ids{-1, 3, -1, 5, -1, -1});
  CHECK(two.columns[0] == Ids{0, 0, 11, 13, 0, 0, 20, 21, 0, 0, 0, 0});
  CHECK(floats(two.columns[1]) == std::vector<float>{0, 0, -1, -2, 0, 0, -1, -1, 0, 0, 0, 0});
  const data::HostMicroBatch all = batch(4);
  CHECK(all.columns[0] ==
        Ids{0, 0, 0, 0, 10, 11, 12, 13, 0, 0, 0, 0, 20, 21, 22, 23, 0, 0, 0, 0, 0, 0, 0, 0});
}
