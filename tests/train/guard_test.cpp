// The stability guard in whole runs.
#include <filesystem>
#include <string>
#include <vector>

#include "tests/catch.h"
#include "tests/train/training_run.h"

using namespace nrl;
using namespace nrl::test;

namespace {

/// Runs on one repeated pattern, which is learned soon, with other tokens in one place.
class Spiky : public Workbench {
 public:
  static constexpr int64_t length = 40, windows = 2 * length * global, planted_step = 30;

  Spiky() {
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i <= windows * sequence; ++i) tokens.push_back(static_cast<int32_t>(i % 4));
    write_tokens("corpus", tokens);
    const int64_t planted = window_of(planted_step);
    for (int64_t i = 0; i < sequence; ++i)
      tokens[static_cast<size_t>(planted * sequence + i)] = static_cast<int32_t>(100 + 31 * i % 100);
    write_tokens("spiky", tokens);
  }

  Finished train(const std::string& name, const std::string& data, std::vector<std::string> keys) const {
    keys.insert(keys.begin(),
                {"data.train.data_path=" + *this / data, "pretrain.max_num_steps=40",
                 "monitoring.stability.window=10", "monitoring.stability.cv_threshold=10",
                 "monitoring.alerting.enabled=true", "monitoring.alerting.thresholds.loss_increase=100"});
    return launcher.empty() ? run(name, keys) : run_ranks(launcher, name, keys);
  }
  std::string launcher;  ///< empty: one rank, in this process

  /// Steps whose loss is far above the one before.
  std::vector<int64_t> jumps(const std::string& name) const {
    const auto loss = values(name, "loss");
    std::vector<int64_t> out;
    for (size_t i = 10; i < loss.size(); ++i)
      if (loss[i] > 2 * loss[i - 1]) out.push_back(static_cast<int64_t>(i) + 1);
    return out;
  }
  Rows skipped(const std::string& name) const {
    return json_lines(read(name + "/logs/skipped.jsonl"), "skipped.jsonl");
  }

 private:
  /// The window of the corpus that the first sample of a step reads. The order depends on the number of
  /// tokens, not on them.
  int64_t window_of(int64_t step) const {
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i <= windows * sequence; ++i)
      tokens.push_back(static_cast<int32_t>(i % sequence == 0 ? i / sequence / 256 : i / sequence % 256));
    write_tokens("numbered", tokens);
    data::DatasetOptions options;
    options.sources.push_back({*this / "numbered", std::nullopt, nullptr});
    options.sequence_length = sequence;
    options.samples = length * global;
    options.seed = 7;
    options.vocab_size = 272;
    std::vector<int32_t> sample(sequence + 1);
    data::open_token_dataset(options)->read((step - 1) * global, sample);
    return sample[0] * 256 + sample[1];
  }
};

std::vector<std::string> on(const std::string& action, std::vector<std::string> more = {}) {
  more.push_back("monitoring.stability.on_instability=" + action);
  return more;
}

}  // namespace

TEST_CASE("a spike of the loss is a warning and an alert, and a healthy run has neither") {
  const Spiky bench;
  const Finished spiky = bench.train("spiky", "spiky", on("warn"));
  INFO(spiky.out + spiky.err);
  REQUIRE(spiky.code == Exit::ok);
  CHECK(bench.jumps("spiky") == std::vector<int64_t>{Spiky::planted_step});
  CHECK(contains(spiky.out + spiky.err, "step 30: loss "));
  const std::string alerts = bench.read("spiky/logs/alerts.jsonl");
  CHECK(contains(alerts, "\"rule\":\"loss_spike\""));
  CHECK(contains(alerts, "loss_spike: step 30: loss "));
  CHECK(!std::filesystem::exists(bench / "spiky/logs/skipped.jsonl"));

  const Finished healthy = bench.train("healthy", "corpus", on("warn"));
  INFO(healthy.out + healthy.err);
  CHECK(healthy.code == Exit::ok);
  CHECK(!contains(healthy.out + healthy.err, "by the trend"));
}

TEST_CASE("skip_step: a spike changes nothing, on any number of ranks, and is listed") {
  Spiky bench;
  const std::vector<std::string> keys =
      on("skip_step", {"checkpointing.save_period=1", "checkpointing.keep_latest_k=null"});
  for (const char* name : {"one", "two"}) {
    bench.launcher = std::string(name) == "two" ? NRL_TWO_RANKS : "";
    const Finished run = bench.train(name, "spiky", keys);
    INFO(run.out + run.err);
    REQUIRE(run.code == Exit::ok);
    std::vector<int64_t> skipped;
    for (const JsonValue& row : bench.steps(name))
      if (row.get_bool("skipped")) skipped.push_back(row.get_int("step"));
    CHECK(skipped == std::vector<int64_t>{30});
    CHECK(bench.weights(name, 29) == bench.weights(name, 30));
    CHECK(bench.weights(name, 30) != bench.weights(name, 31));
    const JsonValue at = bench.position(name, 40);
    CHECK(at.get_int("updates") == 39);
    CHECK(at.get_int("skipped") == 1);
    CHECK(bench.position(name, 30).get_int("skipped_in_a_row") == 0);
    const Rows rows = bench.skipped(name);
    REQUIRE(rows.size() == 1);
    CHECK(rows[0].get_int("step") == 30);
    CHECK(rows[0].get_string("reason") == "limit");
    CHECK(rows[0].get_int("first_sample") == 29 * 4);
    CHECK(rows[0].get_int("end_sample") == 30 * 4);
    const std::string alerts = bench.read(std::string(name) + "/logs/alerts.jsonl");
    CHECK(contains(alerts, "loss_spike"));
    CHECK(!contains(alerts, "non_finite"));
  }
}

TEST_CASE("rollback: back to a checkpoint from before, with a lower rate and other samples") {
  Spiky bench;
  const std::vector<std::string> saves{"checkpointing.save_period=5", "checkpointing.keep_latest_k=null"};
  for (const char* name : {"one", "two"}) {
    bench.launcher = std::string(name) == "two" ? NRL_TWO_RANKS : "";
    const Finished run = bench.train(name, "spiky", on("rollback", saves));
    INFO(run.out + run.err);
    REQUIRE(run.code == Exit::ok);
    CHECK(contains(run.out, "back to step 15, lr x 0.5 (1 of 3), samples 60 to 120 left out"));
    const auto rates = bench.values(name, "lr");
    REQUIRE(rates.size() == 40);  // every step once
    for (size_t step = 1; step <= 40; ++step) CHECK(rates[step - 1] == (step <= 15 ? 1e-2 : 5e-3));
    CHECK(bench.jumps(name).empty());
    const JsonValue at = bench.position(name, 40);
    CHECK(at.get_int("consumed_samples") == (30 + 25) * 4);
    CHECK(at.get_int("recoveries") == 1);
    CHECK(at.get_double("lr_factor") == 0.5);
    CHECK(!bench.position(name, 15).contains("recoveries"));
    const Rows rows = bench.skipped(name);
    REQUIRE(rows.size() == 1);
    CHECK(rows[0].get_string("reason") == "rollback");
    CHECK(rows[0].get_int("step") == 15);
    CHECK(rows[0].get_int("from") == 30);
    CHECK(rows[0].get_int("first_sample") == 60);
    CHECK(rows[0].get_int("end_sample") == 120);
  }
  bench.launcher.clear();
  // The run that goes on after a rollback, in another process, is the same run.
  for (const char* last : {"35", "40"}) {
    const Finished part =
        bench.train("parts", "spiky",
                    on("rollback", {saves[0], saves[1], fmt::format("pretrain.max_num_steps={}", last)}));
    INFO(part.out + part.err);
    REQUIRE(part.code == Exit::ok);
    CHECK(contains(part.out, "1 so far: lr x 0.5") == (std::string(last) == "40"));
  }
  CHECK(bench.weights("parts", 40) == bench.weights("one", 40));

  // With the same samples, the spike comes again: the last allowed rollback, then the end.
  const Finished again = bench.train(
      "again", "spiky",
      on("rollback", {saves[0], saves[1], "monitoring.stability.skip_data=false",
                      "monitoring.stability.max_recoveries=1", "monitoring.stability.lr_factor=1"}));
  INFO(again.out + again.err);
  CHECK(again.code == Exit::diverged);
  CHECK(contains(again.out, "samples 60 to 120 again"));
  CHECK(contains(again.err, "the run has gone back 1 times (monitoring.stability.max_recoveries: 1)"));
  CHECK(contains(again.err, "Rollbacks: from step 30 to 15"));
  const Finished none = bench.train("none", "spiky", on("rollback", {"checkpointing.save_period=25"}));
  CHECK(none.code == Exit::diverged);
  CHECK(contains(none.err,
                 "there is no checkpoint that is more than 10 steps (monitoring.stability.window) older"));
}
