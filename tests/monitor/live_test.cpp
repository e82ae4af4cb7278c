// Telemetry, alerts and live views together, as rank 0 has them.

#include "apps/monitor/live.h"

#include <chrono>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "core/base/clock.h"
#include "core/io/atomic_file.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"
#include "tests/monitor/sample.h"

namespace nrl::monitor {
namespace {

using test::contains;
using LogDir = test::TemporaryDirectory;

struct Shown {
  std::vector<std::string> alerts, notes, warnings;
  Live::Show show() {
    return {.alert = [this](const Alert& alert) { alerts.push_back(alert.message); },
            .note = [this](const std::string& text) { notes.push_back(text); },
            .warn = [this](const std::string& text) { warnings.push_back(text); }};
  }
};

Config everything(const std::string& dir) {
  Config c;
  c.logger.log_dir = dir;
  c.logger.monitor_gpus = true;
  c.logger.gpu_monitoring = {.collection_interval = 0.01, .flush_interval = 0.01};
  c.checkpointing.enabled = false;
  c.monitoring.interval = 0.001;
  c.monitoring.alerting.enabled = true;
  c.monitoring.alerting.rules = {"train/loss > 5 for 1"};
  c.monitoring.visualization = {
      .prometheus = true, .dashboard = true, .port = 0, .textfile = dir + "/run.prom"};
  return c;
}

std::vector<std::string> lines_of(const std::string& file) {
  std::ifstream in(file);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

}  // namespace

TEST_CASE("a run without these keys has nothing of it", "[live]") {
  Config c;
  Shown shown;
  CHECK(Live::open(c, {}, shown.show()) == nullptr);
  c = everything("x");
  c.monitoring.enabled = c.logger.monitor_gpus = false;
  CHECK(Live::open(c, {}, shown.show()) == nullptr);
  c.monitoring.enabled = true;
  CHECK(Live::open(c, {.rank = 1}, shown.show()) == nullptr);  // rank 0 has it
}

TEST_CASE("everything on writes its files and serves the run", "[live]") {
  const LogDir dir;
  make_directories(dir.path());
  const Config config = everything(dir.path());
  Shown shown;
  {
    const auto live = Live::open(config, {.host = "h"}, shown.show());
    REQUIRE(live);
    REQUIRE(live->port() > 0);
    MetricsLog log(dir.path(), 0);
    StepFacts f = sample_step();
    for (int i = 1; i <= 5; ++i) {
      f.step = i;
      f.time = 1700000000 + i;
      log.step(f);
      live->work(0.08, 0.02);
      live->step(f);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      if (!live->due(steady_seconds())) continue;
      const std::vector<std::string> texts = {live->contribution(steady_seconds()),
                                              contribution({.rank = 1, .own_ms = 160}, nullptr)};
      live->gathered(f.step, f.time, texts);
      CHECK_FALSE(live->due(steady_seconds()));
    }
    live->evaluation({.step = 5, .time = 1700000006, .losses = {{"val_loss", 4.5}}});
    live->event("memory_leak", AlertLevel::warning, 5, "grows");
  }
  CHECK(shown.warnings.empty());
  REQUIRE(shown.notes.size() == 1);
  CHECK(contains(shown.notes[0], "http://127.0.0.1:"));
  const std::vector<std::string> telemetry = lines_of(dir / "telemetry.jsonl");
  REQUIRE(telemetry.size() >= 3);
  const Telemetry t = telemetry_from(parse_json(telemetry.back(), "telemetry"));
  REQUIRE(t.ranks.size() == 2);
  CHECK(t.ranks[0].own_ms == Approx(80));
  CHECK(t.ranks[0].waiting_ms == Approx(20));
  CHECK(t.ranks[1].score == Approx(0.5));
  REQUIRE(t.nodes.size() == 1);
  CHECK_FALSE(t.nodes[0].values.empty());
  const std::vector<std::string> alerts = lines_of(dir / "alerts.jsonl");
  CHECK(alerts.size() == shown.alerts.size());
  std::vector<std::string> rules;
  for (const std::string& line : alerts) rules.push_back(alert_from(parse_json(line, "alerts")).rule);
  CHECK(std::count(rules.begin(), rules.end(), "train/loss > 5 for 1") == 1);
  CHECK(std::count(rules.begin(), rules.end(), "straggler") == 1);
  CHECK(rules.back() == "memory_leak");
  const std::string metrics = read_file(dir / "run.prom", 1 << 20);
  CHECK(contains(metrics, "nrl_train_step 5\n"));
  CHECK(contains(metrics, "nrl_train_val_loss 4.5\n"));
  CHECK(contains(metrics, "nrl_train_alerts_firing{rule=\"train/loss > 5 for 1\"} 1\n"));
  CHECK(contains(read_file(dir / "prometheus.json", 1000), "[{\"targets\":[\"127.0.0.1:"));

  // A resumed run keeps the rows up to its checkpoint.
  const size_t before = lines_of(dir / "telemetry.jsonl").size();
  Live::open(config, {.host = "h", .step = 3}, shown.show());
  const std::vector<std::string> kept = lines_of(dir / "telemetry.jsonl");
  CHECK(kept.size() < before);
  for (const std::string& line : kept) CHECK(parse_json(line, "telemetry").get_int("step") <= 3);
}

TEST_CASE("telemetry.jsonl is written in intervals of its own, and at the end", "[live]") {
  const LogDir dir;
  make_directories(dir.path());
  Config c = everything(dir.path());
  c.logger.gpu_monitoring.flush_interval = 1000;
  Shown shown;
  {
    const auto live = Live::open(c, {.host = "h"}, shown.show());
    const std::vector<std::string> texts = {live->contribution(0)};
    live->gathered(1, 1700000001, texts);
    live->gathered(2, 1700000002, texts);
    CHECK(lines_of(dir / "telemetry.jsonl").empty());
  }
  CHECK(lines_of(dir / "telemetry.jsonl").size() == 2);
}

TEST_CASE("a place that cannot be written is a warning", "[live]") {
  const LogDir dir;
  make_directories(dir.path());
  Config c = everything(dir.path());
  c.monitoring.visualization.bind = "192.0.2.1";  // an address of no machine
  c.monitoring.visualization.textfile = {};
  make_directories(dir / "alerts.jsonl");  // not a file
  Shown shown;
  const auto live = Live::open(c, {.host = "h"}, shown.show());
  REQUIRE(live);
  CHECK(live->port() == 0);
  REQUIRE(shown.warnings.size() == 2);
  CHECK(contains(shown.warnings[0], "alerts.jsonl"));
  CHECK(contains(shown.warnings[1], "192.0.2.1"));
  live->step(sample_step());
}

TEST_CASE("a step costs microseconds with everything on", "[live]") {
  const LogDir dir;
  make_directories(dir.path());
  Config c = everything(dir.path());
  c.monitoring.interval = 30;
  c.monitoring.analysis = {.trend_analysis = true, .anomaly_detection = true};
  Shown shown;
  const auto live = Live::open(c, {.host = "h"}, shown.show());
  StepFacts f = sample_step();
  constexpr int steps = 2000;
  const double begin = steady_seconds();
  for (int i = 1; i <= steps; ++i) {
    f.step = i;
    f.time = 1700000000 + 0.1 * i;
    f.loss = 3 + 0.1 * (i % 7);
    live->step(f);
  }
  const double each = (steady_seconds() - begin) / steps;
  WARN("microseconds per step: " << each * 1e6);
  CHECK(each < 1e-3);  // 0.1 % of a step of a second; measured: some 20 us
}

}  // namespace nrl::monitor
