#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <sys/stat.h>

#include "apps/monitor/chart.h"
#include "apps/monitor/communication.h"
#include "apps/monitor/csv.h"
#include "core/base/error.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::monitor;

namespace {

struct Directory {
  Directory() {
    char pattern[] = "/tmp/nrl-report-XXXXXX";
    path = ::mkdtemp(pattern);
  }
  ~Directory() { std::filesystem::remove_all(path); }
  std::string write(const std::string& text, const std::string& name = "metrics.jsonl") const {
    std::ofstream(path + "/" + name) << text;
    return path;
  }
  std::string path;
};

std::string row(int step, const std::string& loss) {
  return "{\"step\":" + std::to_string(step) + ",\"loss\":" + loss +
         ",\"grad_norm\":1.5,\"lr\":0.001,\"tokens\":" + std::to_string(step * 100) +
         ",\"tokens_per_s\":2000,\"skipped\":" + (loss == "null" ? "true" : "false") + "}\n";
}

Exit code_of(const std::string& path, std::string* message = nullptr) {
  try {
    load_history(path);
  } catch (const Error& e) {
    if (message) *message = e.what();
    return e.code();
  }
  return Exit::ok;
}

}  // namespace

TEST_CASE("the history of a run is read back", "[report]") {
  Directory d;
  d.write(row(1, "5") + row(2, "null") + row(3, "4") + "{\"step\":3,\"val_loss\":4.5}\n" + row(4, "3") +
          row(3, "3.5") + row(4, "3.25") + "{\"step\":5,\"lo");
  const RunHistory run = load_history(d.path);
  REQUIRE(run.loss.points.size() == 3);
  // The later rows of steps 3 and 4 replace the earlier ones.
  REQUIRE(run.loss.points[1].step == 3);
  REQUIRE(run.loss.points[1].value == 3.5);
  REQUIRE(run.loss.points.back().value == 3.25);
  REQUIRE(run.loss.tail_mean(2) == 3.375);
  REQUIRE(run.val_loss.points.size() == 1);
  REQUIRE(run.val_loss.points[0].value == 4.5);
  REQUIRE(run.rows == 6);
  REQUIRE(run.lr.points.back().value == 0.001);
  REQUIRE(run.grad_norm.points.back().value == 1.5);
  REQUIRE(run.grad_norm.points.size() == 4);  // the skipped step too
  REQUIRE(run.last_step == 4);
  REQUIRE(run.tokens == 400);
  REQUIRE(run.skipped == 1);
  REQUIRE(run.tokens_per_s.median() == 2000);
  REQUIRE(load_history(d.path + "/metrics.jsonl").loss.points.size() == 3);
}

TEST_CASE("files that are no metrics are refused with their place", "[report]") {
  Directory d;
  std::string message;
  REQUIRE(code_of(d.path, &message) == Exit::no_input);
  REQUIRE(message.find(d.path) != std::string::npos);
  d.write("");
  REQUIRE(code_of(d.path) == Exit::data);
  d.write(row(1, "5") + "not json\n" + row(2, "4"));
  REQUIRE(code_of(d.path, &message) == Exit::data);
  REQUIRE(message.find("metrics.jsonl:2:") != std::string::npos);
  d.write(row(1, "5") + "{\"loss\":5}\n");
  REQUIRE(code_of(d.path, &message) == Exit::data);
  REQUIRE(message.find("step") != std::string::npos);
  d.write(row(1, "\"high\""));
  REQUIRE(code_of(d.path) == Exit::data);
}

TEST_CASE("the table of communication is read as it was written", "[report]") {
  const Communication c{
      .steps = 10,
      .operations = {{"dp", "all_reduce", "shared memory", 4, 20, 40 << 20, 60 << 20, 0.5, 0.125},
                     {"tp", "all_gather", "", 2, 80, 1 << 20, 1 << 19, 0, 0}}};
  const Communication read = communication_from(parse_json(to_json(c).dump(), "test"), "test");
  REQUIRE(read.steps == 10);
  REQUIRE(read.operations.size() == 2);
  const CommFacts& dp = read.operations[0];
  CHECK(dp.group == "dp");
  CHECK(dp.operation == "all_reduce");
  CHECK(dp.algorithm == "shared memory");
  CHECK(dp.ranks == 4);
  CHECK(dp.count == 20);
  CHECK(dp.bytes == 40 << 20);
  CHECK(dp.bus_bandwidth() == Approx((60 << 20) / 0.5));
  CHECK(dp.hidden() == Approx(0.75));
  CHECK(read.operations[1].bus_bandwidth() == 0);
  CHECK(read.operations[1].hidden() == 0);
  CHECK(
      text_table(c) ==
      "group  operation   ranks  calls     bytes      sent     ms  exposed ms  hidden  GB/s bus  carried by\n"
      "dp     all_reduce      4    2.0  4.00 MiB  6.00 MiB  50.00       12.50     75%      0.13  shared "
      "memory\n"
      "tp     all_gather      2    8.0   102 KiB  51.2 KiB   0.00        0.00      0%      0.00\n");
  for (const char* text : {"[]", "{}", R"({"steps":1})", R"({"steps":1,"operations":[{"group":"dp"}]})"}) {
    CAPTURE(text);
    std::string message;
    try {
      communication_from(parse_json(text, "test"), "run/communication.json");
    } catch (const Error& e) {
      CHECK(e.code() == Exit::data);
      message = e.what();
    }
    CHECK(message.find("run/communication.json") != std::string::npos);
  }
}

TEST_CASE("buckets hold the mean and the extremes of their steps", "[report]") {
  Curve curve{"loss"};
  for (int i = 1; i <= 100; ++i) curve.points.push_back({i, static_cast<double>(i)});
  const auto buckets = bucketed(curve, 1, 100, 10);
  REQUIRE(buckets.size() == 10);
  REQUIRE(buckets[0].mean == Approx(5.5));
  REQUIRE(buckets[0].min == 1);
  REQUIRE(buckets[0].max == 10);
  REQUIRE(buckets[9].step == Approx(95.5));
  REQUIRE(buckets[9].min == 91);
  REQUIRE(buckets[9].max == 100);
  REQUIRE(bucketed(curve, 1, 100, 1000).size() == 100);
  const auto middle = bucketed(curve, 41, 60, 2);  // nothing from outside of the range
  REQUIRE(middle.size() == 2);
  REQUIRE(middle[0].mean == Approx(45.5));
  REQUIRE(middle[1].max == 60);
  REQUIRE(Curve{"x", {{1, 5}, {2, 1}, {3, 2}}}.median() == 2);
}

TEST_CASE("ticks are round and inside their range", "[report]") {
  REQUIRE(axis_ticks(0, 10, 5) == std::vector<double>{0, 2, 4, 6, 8, 10});
  const auto small = axis_ticks(2.47, 2.93, 4);
  REQUIRE(small.front() >= 2.47);
  REQUIRE(small.back() <= 2.93);
  REQUIRE(small.size() >= 2);
  REQUIRE(axis_ticks(3, 3, 5) == std::vector<double>{3});
}

TEST_CASE("the chart of a falling loss falls", "[report]") {
  Directory d;
  std::string text;
  for (int i = 1; i <= 40; ++i) text += row(i, std::to_string(10 - i * 0.2));
  d.write(text);
  const std::vector<RunHistory> runs{load_history(d.path)};
  const std::string chart = text_chart(runs, &RunHistory::loss, 40, 8);
  const std::string first = chart.substr(0, chart.find('\n'));
  REQUIRE(first.find("9.8") != std::string::npos);
  REQUIRE(first.find('*') == first.find('|') + 1);
  REQUIRE(std::count(chart.begin(), chart.end(), '*') == 40);
  REQUIRE(chart.find("step 1 to 40") != std::string::npos);
  REQUIRE(text_chart(runs, &RunHistory::val_loss, 40, 8).empty());
  REQUIRE(text_table(runs).find("9.8000") != std::string::npos);
}

TEST_CASE("the table has the figures of the rows", "[report]") {
  Directory d;
  // Losses 6.5, 6.0, ..., 0.5 at the steps 100, 200, ..., 1200: the last ten begin at step 300.
  std::string text;
  for (int i = 1; i <= 12; ++i) {
    std::string line = row(100 * i, std::to_string(7 - i * 0.5));
    line.replace(line.find(":2000,") + 1, 4,
                 std::to_string(1000 * ((i * 5) % 13)));  // 5000, 10000, 2000, ...
    text += line;
  }
  for (const auto& [step, loss] : {std::pair{400, 5.25}, {800, 4.125}, {1200, 4.5}})
    text += "{\"step\":" + std::to_string(step) + ",\"val_loss\":" + std::to_string(loss) + "}\n";
  d.write(text);
  RunHistory run = load_history(d.path);
  run.name = "run";
  // The mean of 5.5, 5, ..., 1 is 3.25, the median of 1000, 2000, ..., 12000 is 7000.
  CHECK(text_table(std::vector<RunHistory>{run}) ==
        "run  steps  tokens  first loss  last 10 steps  best val loss  median tokens/s\n"
        "run  1,200   120 k      6.5000         3.2500  4.1250 at 800             6.5k\n");
}

TEST_CASE("the page needs no other file and escapes names", "[report]") {
  Directory d;
  std::filesystem::create_directory(d.path + "/<b>&\"run");
  d.write(row(1, "5") + row(2, "4") + "{\"step\":2,\"val_loss\":4.5}\n", "<b>&\"run/metrics.jsonl");
  const std::vector<RunHistory> runs{load_history(d.path + "/<b>&\"run")};
  const std::string page = html_report(runs);
  REQUIRE(page.find("<b>") == std::string::npos);
  REQUIRE(page.find("&lt;b&gt;&amp;&quot;run") != std::string::npos);
  for (const char* outside : {"http", "src=", "href=", "@import", "<script"})
    REQUIRE(page.find(outside) == std::string::npos);
  size_t panels = 0;
  for (size_t at = 0; (at = page.find("<svg", at)) != std::string::npos; ++at) ++panels;
  REQUIRE(panels == 4);
  REQUIRE(page.find("validation loss 4.5000 at step 2") != std::string::npos);
  REQUIRE(page.find("nan") == std::string::npos);
}

TEST_CASE("the table of a run has one line a step", "[report]") {
  Directory d;
  d.write(
      "{\"step\":1,\"time\":10.5,\"loss\":2.5,\"mfu\":null}\n"
      "{\"step\":1,\"time\":11,\"val_loss\":2.25}\n"
      "{\"step\":1,\"text\":\"a, \\\"b\\\"\"}\n"
      "{\"step\":2,\"time\":12,\"loss\":2,\"skipped\":true}\n"
      "{\"step\":3,\"time\":13,\"loss\":9}\n"
      "{\"step\":2,\"time\":14,\"loss\":1.5}\n"
      "{\"step\":5,\"lo");
  CHECK(metrics_csv(d.path) ==
        "step,time,loss,mfu,val_loss,text,skipped\n"
        "1,10.5,2.5,,2.25,\"a, \"\"b\"\"\",\n"
        "2,14,1.5,,,,\n");
  Directory empty;
  empty.write("");
  CHECK_THROWS_AS(metrics_csv(empty.path), Error);
}

TEST_CASE("charts go by tokens, and by hours of training without the pauses", "[report]") {
  Directory d;
  std::string text;
  const auto row_at = [&](int step, int time) {
    text += fmt::format("{{\"step\":{},\"time\":{},\"loss\":1,\"tokens\":{}}}\n", step, time, step * 100);
  };
  row_at(1, 1000 + 1800);
  row_at(2, 1000 + 3600);
  text += "{\"step\":2,\"time\":4700,\"val_loss\":2}\n";
  row_at(3, 90000 + 3600);  // of the third session; the second one left no row
  d.write(text);
  const auto session = [](int start) {
    return fmt::format(R"({{"start":{},"end":null,"first_step":0,"last_step":null,"exit":null}})", start);
  };
  d.write(fmt::format(R"({{"run_id":"ab","name":"n","created":1000,"sessions":[{},{},{}]}})", session(1000),
                      session(80000), session(90000)),
          "run.json");
  const std::vector<RunHistory> runs{load_history(d.path)};
  const auto steps = [](const Curve& curve) {
    std::vector<int64_t> out;
    for (const CurvePoint& p : curve.points) out.push_back(p.step);
    return out;
  };
  const RunHistory hours = placed_by(runs, By::hours)[0], tokens = placed_by(runs, By::tokens)[0];
  CHECK(steps(hours.loss) == std::vector<int64_t>{1800000, 3600000, 7200000});
  CHECK(steps(tokens.loss) == std::vector<int64_t>{100, 200, 300});
  CHECK(steps(tokens.val_loss) == std::vector<int64_t>{200});
  CHECK(text_chart(runs, &RunHistory::loss, 40, 8, By::hours).find("0.5 to 2 h") != std::string::npos);
  CHECK(text_chart(runs, &RunHistory::loss, 40, 8, By::tokens).find("100 to 300 tokens") !=
        std::string::npos);
  CHECK(text_chart(runs, &RunHistory::loss, 40, 8).find("step 1 to 3") != std::string::npos);
  CHECK(html_report(runs, By::hours).find(">1.5 h</text>") != std::string::npos);
  CHECK(html_report(runs, By::tokens).find("at 200 tokens</title>") != std::string::npos);
  d.write("{}", "run.json");
  CHECK(code_of(d.path) == Exit::data);
}
