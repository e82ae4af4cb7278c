// Dropout in whole runs: the masks belong to the seed, the step and the row of the global batch, whatever the
// microbatches are and wherever the run was interrupted.

#include <set>

#include "tests/catch.h"
#include "tests/train/training_run.h"

using namespace nrl;
using namespace nrl::test;

namespace {

constexpr const char* kinds[] = {"resid_pdrop", "embd_pdrop", "attn_pdrop"};

/// The keys that drop a third at the places of `which` ("all": everywhere) and nothing elsewhere.
std::vector<std::string> dropping(std::string_view which) {
  std::vector<std::string> keys;
  for (std::string_view kind : kinds)
    keys.push_back(fmt::format("policy.model.{}={}", kind, which == kind || which == "all" ? 0.3 : 0.0));
  return keys;
}

class DropoutBench : public Workbench {
 public:
  DropoutBench() {
    model =
        "{model_type: gpt2, vocab_size: 272, n_embd: 16, n_layer: 2, n_head: 4, n_positions: 64, "
        "initializer_range: 0.2}";
  }
  std::vector<double> losses(std::string_view which, std::vector<std::string> more) {
    const std::vector<std::string> keys = dropping(which);
    more.insert(more.begin(), keys.begin(), keys.end());
    more.emplace_back("checkpointing.enabled=false");
    const Finished finished = run("run", more);
    INFO(finished.err);
    REQUIRE(finished.code == Exit::ok);
    return values("run", "loss");
  }
};

}  // namespace

TEST_CASE("the size of the microbatches changes no mask") {
  DropoutBench bench;
  const std::vector<double> plain = bench.losses("none", {});
  for (std::string_view which : {"resid_pdrop", "embd_pdrop", "attn_pdrop", "all"}) {
    CAPTURE(which);
    const std::vector<double> one = bench.losses(which, {"policy.train_micro_batch_size=1"});
    REQUIRE(one.size() == 4);
    for (const char* micro : {"2", "4"}) {
      const std::vector<double> other =
          bench.losses(which, {fmt::format("policy.train_micro_batch_size={}", micro)});
      // Only the order of sums differs.
      for (size_t i = 0; i < 4; ++i) CHECK(other[i] == Approx(one[i]).epsilon(2e-6));
    }
    // Far more than the order of sums does.
    CHECK(std::abs(one[0] - plain[0]) > 1e-4 * plain[0]);
  }
}

TEST_CASE("the size of the microbatches changes no mask of documents kept apart") {
  DropoutBench bench;
  std::vector<int32_t> tokens = bench.random_tokens(2000, 3);
  for (size_t i = 0; i < tokens.size(); i += 3) tokens[i] = 256;
  bench.write_tokens("documents", tokens);
  const auto losses = [&](const std::string& micro) {
    return bench.losses("all", {"policy.train_micro_batch_size=" + micro, "policy.tokenizer.name=bytes",
                                "data.train.data_path=" + bench / "documents", "data.reset_position_ids=true",
                                "data.reset_attention_mask=true", "data.eod_mask_loss=true"});
  };
  const std::vector<double> one = losses("1");
  REQUIRE(one.size() == 4);
  for (const char* micro : {"2", "4"}) {
    const std::vector<double> other = losses(micro);
    for (size_t i = 0; i < 4; ++i) CHECK(other[i] == Approx(one[i]).epsilon(2e-6));
  }
}

TEST_CASE("every step and every seed has masks of its own") {
  DropoutBench bench;
  // All samples are the same, and the weights stay: what differs from step to step are the masks.
  bench.write_tokens("one", std::vector<int32_t>(200, 5));
  REQUIRE(bench.run("start", {"pretrain.max_num_steps=0"}).code == Exit::ok);
  const std::string start = bench / "start/checkpoints/step-0";
  bench.model = "{}";
  const auto distinct = [&](std::string_view which, const std::string& seed) {
    const auto found =
        bench.losses(which, {"policy.model_name=" + start, "data.train.data_path=" + bench / "one",
                             "data.seed=3", "pretrain.seed=" + seed, "policy.optimizer.lr=1e-30",
                             "policy.train_micro_batch_size=4", "pretrain.max_num_steps=5"});
    return std::set<double>(found.begin(), found.end());
  };
  CHECK(distinct("none", "1").size() == 1);
  for (std::string_view which : {"resid_pdrop", "embd_pdrop", "attn_pdrop"}) {
    CAPTURE(which);
    std::set<double> first = distinct(which, "1");
    CHECK(first.size() == 5);
    CHECK(distinct(which, "1") == first);
    for (double loss : distinct(which, "2")) CHECK(first.insert(loss).second);
  }
}

TEST_CASE("a resumed run draws the masks of the run without a break") {
  DropoutBench bench;
  const std::vector<std::string> keys = dropping("all");
  const auto run = [&](const std::string& name, const std::string& steps) {
    std::vector<std::string> all = keys;
    all.push_back("pretrain.max_num_steps=" + steps);
    CHECK(bench.run(name, all).code == Exit::ok);
  };
  run("whole", "5");
  for (const char* steps : {"1", "3", "5"}) run("parts", steps);
  CHECK(bench.values("parts", "loss") == bench.values("whole", "loss"));
  CHECK(bench.weights("parts", 5) == bench.weights("whole", 5));
}
