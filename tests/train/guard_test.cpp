// The stability guard in whole runs.
#include <chrono>
#include <csignal>
#include <filesystem>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>

#include "apps/train/launch/stop_signal.h"
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

TEST_CASE("rollback: sinks have every step once, and say that the run went back") {
  const Spiky bench;
  const Finished run =
      bench.train("run", "spiky",
                  on("rollback", {"checkpointing.save_period=5", "checkpointing.keep_latest_k=null",
                                  "logger.tensorboard_enabled=true", "logger.wandb_enabled=true",
                                  "logger.mlflow_enabled=true",
                                  "monitoring.visualization.textfile=" + bench / "run.prom"}));
  INFO(run.out + run.err);
  REQUIRE(run.code == Exit::ok);
  REQUIRE(contains(run.out, "back to step 15"));
  const std::string logs = bench / "run/logs/";
  std::map<std::string, std::vector<std::string>> files;  // by extension
  for (const auto& entry : std::filesystem::recursive_directory_iterator(logs)) {
    const std::string path = entry.path(), name = entry.path().filename();
    if (name == "loss" || name.ends_with(".wandb") || name.starts_with("events.") ||
        name == "step-00000015.txt")
      files[name.starts_with("events.") ? "events" : entry.path().extension()].push_back(path);
  }
  // MLflow: metrics/train/loss.
  REQUIRE(files[""].size() == 1);
  std::istringstream metric(read_file(files[""][0], 1 << 20));
  std::vector<int64_t> steps;
  double time = 0, value = 0;
  for (int64_t step = 0; metric >> time >> value >> step;) steps.push_back(step);
  CHECK(steps == bench.step_numbers("run"));
  CHECK(std::ssize(steps) == 40);
  REQUIRE(files[".txt"].size() == 1);
  CHECK(contains(read_file(files[".txt"][0], 1 << 20), "step 30: loss "));
  // A session that continues after step 15, of which these formats have tests of their own.
  CHECK(files["events"].size() == 2);
  CHECK(files[".wandb"].size() == 2);
  CHECK(contains(run.out, "offline-run-*-"));
  CHECK(contains(bench.read("run.prom"), "nrl_train_rollbacks_total 1\n"));
  CHECK(contains(bench.read("run.prom"), "nrl_train_step_seconds_count 55\n"));
  // The time of discarded steps is lost.
  double good_ms = 0;
  for (const double ms : bench.values("run", "step_ms")) good_ms += ms;
  const JsonValue summary = parse_json(bench.read("run/logs/summary.json"), "summary"),
                  of_run = parse_json(bench.read("run/logs/run.json"), "run");
  CHECK(summary.get_double("goodput") * (summary.get_double("time") - of_run.get_double("created")) ==
        Approx(good_ms / 1e3).epsilon(0.01));
}

TEST_CASE("rollback: a stop request in the bad step takes effect after it") {
  const Spiky bench;
  const std::vector<std::string> keys =
      on("rollback",
         {"checkpointing.save_period=5", "checkpointing.keep_latest_k=null", "pretrain.val_period=29",
          "pretrain.val_batches=3000", "data.validation.data_path=" + bench / "corpus"});
  // The request comes in the evaluation before step 30, which is the bad one.
  sigset_t mask;
  ::pthread_sigmask(SIG_BLOCK, nullptr, &mask);
  train::stop::handle_at_start();  // blocks signals in this thread
  std::jthread user([&](const std::stop_token& ends) {
    const std::string metrics = bench / "run/logs/metrics.jsonl";
    while (!ends.stop_requested()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (!std::filesystem::exists(metrics)) continue;
      if (!contains(bench.read("run/logs/metrics.jsonl"), "\n{\"step\":29,")) continue;
      ::kill(::getpid(), SIGUSR1);
      return;
    }
  });
  const Finished stopped = bench.train("run", "spiky", keys);
  user.request_stop();
  user.join();
  train::stop::handle_at_start();  // forgets the request
  ::pthread_sigmask(SIG_SETMASK, &mask, nullptr);
  INFO(stopped.out + stopped.err);
  CHECK(stopped.code == Exit::stopped);
  CHECK(contains(stopped.out, "back to step 15"));
  CHECK(contains(stopped.out, "stopped after 16/40 steps"));
  CHECK(bench.position("run", 16).get_int("recoveries") == 1);
  CHECK(bench.position("run", 16).get_double("lr_factor") == 0.5);
  CHECK(bench.train("run", "spiky", keys).code == Exit::ok);
  CHECK(bench.train("whole", "spiky", keys).code == Exit::ok);
  CHECK(bench.weights("run", 40) == bench.weights("whole", 40));
}
