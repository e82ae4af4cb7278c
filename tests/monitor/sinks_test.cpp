#include "apps/monitor/sinks.h"

#include <atomic>
#include <chrono>
#include <filesystem>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "apps/monitor/open_sinks.h"
#include "apps/monitor/rows.h"
#include "apps/monitor/settings.h"
#include "core/base/error.h"
#include "core/config/load.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"
#include "tests/monitor/sample.h"

using namespace nrl;
using namespace nrl::monitor;

namespace {

struct Seen {
  std::vector<int64_t> steps;
  std::vector<std::string> texts;
  int ends = 0, exit = -1;
  std::atomic<int> flushes = 0;
};

/// Records its calls in `seen`. Fails at the step `fails_at`; waits for `gate` at its first row.
class FakeSink : public Sink {
 public:
  FakeSink(Seen& seen, int64_t fails_at = -1, std::shared_future<void> gate = {})
      : seen_(seen), fails_at_(fails_at), gate_(std::move(gate)) {}
  std::string_view name() const override { return "fake"; }
  void row(const Row& row) override {
    if (gate_.valid()) gate_.wait();
    if (row.step == fails_at_) fail(Exit::io, "FILE: cannot write");
    seen_.steps.push_back(row.step);
  }
  void text(int64_t step, double, std::string_view tag, std::string_view text) override {
    seen_.texts.push_back(fmt::format("{} {} {}", step, tag, text));
  }
  void end_step() override { seen_.ends += 1; }
  void flush() override { seen_.flushes += 1; }
  void close(int64_t, double, int exit_code) override { seen_.exit = exit_code; }
  std::string next() const override { return "look"; }

 private:
  Seen& seen_;
  int64_t fails_at_;
  std::shared_future<void> gate_;
};

std::vector<std::unique_ptr<Sink>> list(auto... sinks) {
  std::vector<std::unique_ptr<Sink>> out;
  (out.push_back(std::move(sinks)), ...);
  return out;
}

size_t threads_of_process() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& task : std::filesystem::directory_iterator("/proc/self/task")) count += 1;
  return count;
}

const double* value_of(const Row& row, std::string_view name) {
  for (const auto& [key, value] : row.values)
    if (key == name) return &value;
  return nullptr;
}

}  // namespace

TEST_CASE("sinks get all entries in order", "[sinks]") {
  Seen a, b;
  Sinks sinks(list(std::make_unique<FakeSink>(a), std::make_unique<FakeSink>(b)), {}, 0.001);
  std::vector<int64_t> expected;
  for (int64_t step = 1; step <= 500; ++step) {
    sinks.row({.step = step});
    expected.push_back(step);
  }
  sinks.text(500, 0, "sample", "once upon");
  sinks.close(500, 0, 75);
  for (const Seen* s : {&a, &b}) {
    CHECK(s->steps == expected);
    CHECK(s->texts == std::vector<std::string>{"500 sample once upon"});
    CHECK(s->flushes > 0);
    CHECK(s->exit == 75);
  }
  CHECK(sinks.next() == std::vector<std::string>{"look", "look"});
  sinks.row({.step = 501});  // ignored
  CHECK(a.steps.size() == 500);
}

TEST_CASE("without sinks there is no thread", "[sinks]") {
  const size_t before = threads_of_process();
  {
    Sinks none;
    CHECK(threads_of_process() == before);
    none.row({.step = 1});
    none.close(1, 0, 0);
    CHECK(none.next().empty());
  }
  Seen seen;
  const Sinks one(list(std::make_unique<FakeSink>(seen)));
  CHECK(threads_of_process() == before + 1);
}

TEST_CASE("the end of a step is written at once", "[sinks]") {
  Seen seen;
  Sinks sinks(list(std::make_unique<FakeSink>(seen)), {}, 3600);
  sinks.row({.step = 1});
  CHECK(seen.flushes == 0);
  sinks.end_step();
  for (int i = 0; i < 2000 && seen.flushes == 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK(seen.flushes == 1);
  CHECK(seen.ends == 1);
}

TEST_CASE("a sink that fails is reported once, and the others go on", "[sinks]") {
  Seen bad, good;
  std::vector<std::string> reports;
  Sinks sinks(
      list(std::make_unique<FakeSink>(bad, 3), std::make_unique<FakeSink>(good)),
      [&](const std::string& text) { reports.push_back(text); }, 0.001);
  for (int64_t step = 1; step <= 50; ++step) {
    sinks.row({.step = step});
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  sinks.close(50, 0, 0);
  CHECK(bad.steps == std::vector<int64_t>{1, 2});
  CHECK(bad.exit == -1);
  CHECK(good.steps.size() == 50);
  CHECK(reports == std::vector<std::string>{"FILE: cannot write; the run continues without fake"});
  CHECK(sinks.next() == std::vector<std::string>{"look"});
}

TEST_CASE("a full queue drops its oldest rows and says how many", "[sinks]") {
  Seen slow;
  std::promise<void> open;
  std::vector<std::string> reports;
  Sinks sinks(
      list(std::make_unique<FakeSink>(slow, -1, open.get_future().share())),
      [&](const std::string& text) { reports.push_back(text); }, 0.001);
  sinks.row({.step = 0});
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // the thread has taken row 0 and waits
  const auto rows = static_cast<int64_t>(Sinks::capacity) + 10;
  for (int64_t step = 1; step <= rows; ++step) sinks.row({.step = step});
  open.set_value();
  sinks.close(rows, 0, 0);
  REQUIRE(slow.steps.size() == Sinks::capacity + 1);
  CHECK(slow.steps[0] == 0);
  CHECK(slow.steps[1] == 11);
  CHECK(slow.steps.back() == rows);
  REQUIRE(reports.size() == 1);
  CHECK(test::contains(reports[0], "its oldest 10 rows were dropped"));
}

TEST_CASE("a run that ends without close() still writes its rows", "[sinks]") {
  Seen seen;
  {
    Sinks sinks(list(std::make_unique<FakeSink>(seen)), {}, 3600);
    sinks.row({.step = 1});
  }
  CHECK(seen.steps == std::vector<int64_t>{1});
  CHECK(seen.exit == -1);
}

TEST_CASE("the rows of sinks have NeMo RL's names", "[sinks]") {
  StepFacts f = sample_step();
  f.world_size = 4;
  f.metrics = {{.name = "accuracy", .value = 0.75}};
  f.router = {.aux_loss = 1.5, .z_loss = 2.5, .load = 1.25};
  const Row row = sink_row(f);
  CHECK(row.step == 120);
  CHECK(row.time == sample_time);
  const auto is = [&](std::string_view name, double expected) {
    CAPTURE(name);
    const double* value = value_of(row, name);
    REQUIRE(value != nullptr);
    CHECK(std::abs(*value - expected) <= 1e-9 * std::abs(expected));
  };
  is("train/loss", 6.231);
  is("train/grad_norm", 0.842);
  is("train/lr", 1.71e-4);
  is("train/tokens", 62914560);
  is("train/skipped", 0);
  is("train/accuracy", 0.75);
  is("train/router_aux_loss", 1.5);
  is("train/expert_load", 1.25);
  is("perf/tokens_per_s", 412300);
  is("perf/mfu", 0.47);
  is("perf/exposed_ms", 83);
  is("timing/train/total_step_time", 1.272);
  is("timing/train/policy_training", 1.268);
  is("timing/train/valid_tokens_per_sec_per_gpu", 412300 / 4.);
  is("memory/params_gb", 2.469606195);
  is("memory/allocated_gb", 2 * 2.469606195);
  is("memory/max_allocated_gb", 44.667659878);
  CHECK(value_of(row, "train/loss_scale") == nullptr);
  f.examples = {.loss_tokens = 1000, .efficiency = 1, .imbalance = 0};
  f.mfu.reset();
  CHECK(*value_of(sink_row(f), "timing/train/valid_tokens_per_sec_per_gpu") == 1000 / 1.272 / 4);
  CHECK(value_of(sink_row(f), "perf/mfu") == nullptr);

  const Row eval = sink_row(EvalFacts{144, sample_time, {{"val_loss", 6.5}, {"val_loss/code", 5.5}}, 4.25});
  CHECK(*value_of(eval, "validation/val_loss") == 6.5);
  CHECK(*value_of(eval, "validation/val_loss_code") == 5.5);
  CHECK(*value_of(eval, "timing/validation/total_validation_time") == 4.25);
}

TEST_CASE("a sink that cannot be opened is left out", "[sinks]") {
  const test::TemporaryDirectory dir;
  write_file_atomic(dir / "tensorboard", "a file");
  LoggerConfig config;
  config.log_dir = dir.path();
  config.tensorboard_enabled = config.wandb_enabled = true;
  std::vector<std::string> reports;
  const RunInfo run{.id = "0a1b2c3d", .name = "n", .created = sample_time, .time = sample_time, .host = "h"};
  const auto sinks = open_sinks(config, run, [&](const std::string& text) { reports.push_back(text); });
  REQUIRE(sinks.size() == 1);
  CHECK(sinks[0]->name() == "wandb");
  REQUIRE(reports.size() == 1);
  CHECK(test::contains(reports[0], "Not a directory"));
  CHECK(test::contains(reports[0], "; the run continues without tensorboard"));
  CHECK(!test::contains(reports[0], "bug"));
  CHECK(open_sinks(LoggerConfig{}, run, {}).empty());
}

TEST_CASE("settings are the given keys with their values", "[sinks]") {
  const ConfigResult config = load_config_text(
      "policy:\n  model: {model_type: llama, vocab_size: 8, hidden_size: 16, tie_word_embeddings: true}\n"
      "  optimizer: {lr: 3e-4, betas: [0.9, 0.95]}\ndata: {train: {data_path: corpus}}\n",
      "run.yaml", std::vector<std::string>{"logger.log_interval=3", "checkpointing.higher_is_better=false"});
  const auto settings = given_settings(config);
  const auto text_of = [&](std::string_view key) {
    for (const auto& [name, value] : settings)
      if (name == key) return value;
    return std::string("absent");
  };
  CHECK(setting_value(text_of("policy.optimizer.lr")).as_double() == 3e-4);
  CHECK(setting_value(text_of("policy.optimizer.betas")).items().size() == 2);
  CHECK(setting_value(text_of("logger.log_interval")).as_int() == 3);
  CHECK(text_of("checkpointing.higher_is_better") == "false");  // a key that is not built yet
  CHECK(setting_value(text_of("policy.model.model_type")).as_string() == "llama");
  CHECK(setting_value(text_of("policy.model.tie_word_embeddings")).as_bool());
  CHECK(text_of("logger.log_dir") == "absent");
  CHECK(setting_value("{a: 1}").is_string());
}
