// The live view: following files, and frames of several widths.

#include "apps/monitor/watch.h"

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "apps/monitor/metrics.h"
#include "core/base/error.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"
#include "tests/monitor/sample.h"

namespace nrl::monitor {
namespace {

using test::contains;
using Directory = test::TemporaryDirectory;

void append(const std::string& file, const std::string& text) {
  std::ofstream(file, std::ios::app) << text;
}

struct Follow {
  explicit Follow(const std::string& path) : follower(path) {}
  std::string read() {
    std::string text;
    follower.read([&](std::string_view line) { text += std::string(line) + ";"; },
                  [&] { text += "restart;"; });
    return text;
  }
  LineFollower follower;
};

void write_run(const std::string& dir, int steps) {
  MetricsLog log(dir, 0);
  StepFacts f = sample_step();
  for (int i = 1; i <= steps; ++i) {
    f.step = i;
    f.time = 1700000000 + i;
    f.loss = 5.0 - 0.01 * i;
    log.step(f);
  }
  Telemetry t{.step = steps, .time = 1700000000.0 + steps, .nodes = {}, .ranks = {}};
  t.nodes.push_back({.host = "node-a\x1b[31m",
                     .values = {{"cpu", 0.5},
                                {"mem_bytes", 12e9},
                                {"mem_total_bytes", 64e9},
                                {"gpu.0.util", 0.97},
                                {"gpu.0.mem_bytes", 40e9},
                                {"gpu.0.mem_total_bytes", 80e9},
                                {"gpu.0.clock_mhz", 1980}}});
  for (int rank = 0; rank < 12; ++rank)
    t.ranks.push_back({.rank = rank, .own_ms = 100.0 + rank, .waiting_ms = 5, .score = rank == 7 ? 0.5 : 1});
  append(dir + "/telemetry.jsonl", to_json(t).dump() + "\n");
  for (int i = 0; i < 7; ++i)
    append(dir + "/alerts.jsonl", to_json(Alert{.rule = "r",
                                                .level = AlertLevel::critical,
                                                .step = i,
                                                .time = 1700000000,
                                                .message = fmt::format("alert number {}", i)})
                                          .dump() +
                                      "\n");
}

}  // namespace

TEST_CASE("a file is followed through appends, replacement and truncation", "[watch]") {
  const Directory dir;
  const std::string file = dir / "f";
  Follow follow(file);
  CHECK(follow.read().empty());  // there is no file yet
  append(file, "one\ntw");
  CHECK(follow.read() == "one;");
  append(file, "o\n");
  CHECK(follow.read() == "two;");
  CHECK(follow.read().empty());
  append(dir / "g", "three\nfour\nfive\n");
  std::filesystem::rename(dir / "g", file);  // as a resumed run does
  CHECK(follow.read() == "restart;three;four;five;");
  std::ofstream(file, std::ios::trunc) << "x\n";
  CHECK(follow.read() == "restart;x;");
  append(file, std::string(3 << 20, 'y') + "\nz\n");
  CHECK(follow.read() == "z;");  // lines that no row has are left out
}

TEST_CASE("a run is shown at every width", "[watch]") {
  const Directory dir;
  write_run(dir.path(), 60);
  std::vector<WatchedRun> runs;
  runs.emplace_back(dir.path());
  runs[0].history.name = "logs";
  runs[0].max_steps = 100;
  runs[0].update();
  for (const int columns : {10, 20, 39, 40, 80, 200}) {
    CAPTURE(columns);
    const std::string text = watch_text(runs, columns, 0, 1700000061);
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) CHECK(line.size() <= static_cast<size_t>(columns));
    CHECK(!contains(text, "\x1b"));  // a host's name cannot command the terminal
    CHECK(contains(text, "logs"));
    if (columns >= 20) CHECK(contains(text, "logs  step 60/100"));
  }
  const std::string wide = watch_text(runs, 200, 0, 1700000061);
  for (const char* part : {"60.0 %  eta 51s", "loss 4.4000  412300 tok/s",
                           "step 1272.0 ms: computing 1185.0 (gemm 910.0  attention 120.5)",
                           "communicating 83.0  data 4.0", "cpu 50 %  memory 12.0 of 64.0 GB",
                           "gpu 0  97 % busy  40.0 of 80.0 GB  1980 MHz", "rank 7  score 0.50 slow",
                           "and 4 more ranks", "step 6  CRITICAL alert number 6", "tokens_per_s +--"}) {
    CAPTURE(wide, part);
    CHECK(contains(wide, part));
  }
  CHECK(wide.find("rank 7") < wide.find("rank 0"));  // the slowest first
  CHECK(!contains(wide, "alert number 1"));          // only the last ones
  const std::string low = watch_text(runs, 80, 5, 1700000061);
  CHECK(std::count(low.begin(), low.end(), '\n') == 5);
  // Hours later nothing has come: the run is dead.
  CHECK(contains(watch_text(runs, 80, 0, 1700000060 + 7200), "last row 2h00m ago"));
}

TEST_CASE("rows that come later are shown, and broken ones are counted", "[watch]") {
  const Directory dir;
  WatchedRun run(dir.path());
  run.update();
  CHECK(contains(watch_text({&run, 1}, 80, 0, 5), "no steps yet"));
  write_run(dir.path(), 3);
  append(dir / "metrics.jsonl",
         "{\"step\": \"x\"}\nnot json\n{\"step\":4,\"time\":1700000004,\"val_loss\":4.5,\"eval_s\":1}\n");
  append(dir / "telemetry.jsonl", "{\"step\":1}\n");
  append(dir / "run.json", R"({"sessions": [{"start": 1, "exit": null}, {"start": 2, "exit": 75}]})");
  run.update();
  CHECK(run.history.last_step == 3);
  CHECK(run.unreadable == 3);
  CHECK(run.last.at("val_loss") == 4.5);
  CHECK(run.ending == "ended, exit 75");
  const std::string text = watch_text({&run, 1}, 100, 0, 1700000005);
  CHECK(contains(text, "0 steps skipped, 3 lines not readable"));
  const test::Caught missing = test::error_of([&] { WatchedRun none(dir / "none"); });
  CHECK(missing.code == static_cast<int>(Exit::no_input));
  CHECK(contains(missing.text, "no such directory"));
  const std::string row = read_file(dir / "metrics.jsonl", 1 << 20);
  for (int i = 0; i < 200; ++i) {
    std::ofstream(dir / "metrics.jsonl", std::ios::trunc) << test::mutated(row, i);
    std::ofstream(dir / "run.json", std::ios::trunc)
        << test::mutated(R"({"sessions": [{"start": 2, "exit": 75}]})", i);
    run.update();
    watch_text({&run, 1}, 80, 0, 1700000005);
  }
}

}  // namespace nrl::monitor
