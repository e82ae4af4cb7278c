// Figures over commits: the file, changes in it, and the gate.

#include "apps/bench/history.h"

#include <filesystem>
#include <fstream>

#include "core/base/error.h"
#include "core/base/philox.h"
#include "tests/catch.h"

using namespace nrl;
using bench::GateRow;
using bench::HistoryEntry;

namespace {

HistoryEntry entry(double value, double probe = 1e9, const std::string& commit = "c") {
  return {.metric = "step_ms",
          .config = "c.yaml",
          .machine = "m",
          .commit = commit,
          .time = 1.7e9,
          .value = value,
          .interval = {value * 0.9, value * 1.1},
          .probe = probe};
}

// Values of a machine that is not idle: 2 % of noise, every tenth measurement much slower.
std::vector<HistoryEntry> noisy(uint64_t seed, size_t count, double mean, size_t from = 1000,
                                double factor = 1) {
  const PhiloxStream random(seed, "history");
  std::vector<HistoryEntry> out;
  for (size_t i = 0; i < count; ++i) {
    const double slow = random.uniform(5000 + i) < 0.1F ? 1.2 : 1;
    out.push_back(entry(mean * (1 + 0.02 * random.normal(i)) * slow * (i >= from ? factor : 1)));
  }
  return out;
}

std::vector<double> values_of(const std::vector<HistoryEntry>& entries) {
  std::vector<double> out;
  for (const HistoryEntry& e : entries) out.push_back(e.value);
  return out;
}

std::string refusal(const std::string& text) {
  const std::string path = std::filesystem::temp_directory_path() / "nrl-history-test.jsonl";
  std::ofstream(path) << text;
  std::string out;
  try {
    (void)bench::load_history(path);
  } catch (const Error& e) {
    CHECK(e.code() == Exit::data);
    out = e.what();
  }
  std::filesystem::remove(path);
  return out;
}

}  // namespace

TEST_CASE("a history is written and read back, and a malformed one is refused with its line", "[history]") {
  const std::string path = std::filesystem::temp_directory_path() / "nrl-history-roundtrip.jsonl";
  std::filesystem::remove(path);
  const HistoryEntry a = entry(12.5), b = entry(13, 0, "second");
  bench::append_history(path, {{a}});
  bench::append_history(path, {{b}});
  const auto read = bench::load_history(path);
  std::filesystem::remove(path);
  REQUIRE(read.size() == 2);
  CHECK(bench::to_json(read[0]).dump() == bench::to_json(a).dump());
  CHECK(bench::to_json(read[1]).dump() == bench::to_json(b).dump());
  const std::string good = bench::to_json(a).dump() + "\n";
  CHECK(refusal(good).empty());
  CHECK(refusal(good + "nothing\n").find("jsonl:2") != std::string::npos);
  CHECK(refusal(good + "{}\n").find("jsonl:2") != std::string::npos);
  CHECK(refusal(good + "\n").find("jsonl:2") != std::string::npos);
  HistoryEntry wrong = a;
  wrong.value = 0;
  CHECK(refusal(bench::to_json(wrong).dump()).find("expected a positive value") != std::string::npos);
  // No cut of a good file is accepted but at the end of a line, and none crashes.
  for (size_t cut = 1; cut + 1 < good.size(); ++cut) CHECK(!refusal(good + good.substr(0, cut)).empty());
}

TEST_CASE("a lasting change is found where it is, and none in noise", "[history]") {
  int found = 0, right = 0, alarms = 0;
  constexpr int trials = 40;
  for (uint64_t t = 0; t < trials; ++t) {
    if (const auto change = bench::find_change(values_of(noisy(t, 40, 10, 28, 1.1)))) {
      ++found;
      right += change->at >= 27 && change->at <= 29 ? 1 : 0;
      CHECK(change->ratio > 1.05);
    }
    alarms += bench::find_change(values_of(noisy(1000 + t, 40, 10))) ? 1 : 0;
  }
  CHECK(found >= trials * 95 / 100);
  CHECK(right >= trials * 80 / 100);
  CHECK(alarms <= 2);
  // A change that is over does not count, nor do fewer than five values on a side.
  auto over = noisy(7, 40, 10, 20, 1.2);
  for (size_t i = 38; i < 40; ++i) over[i].value = 10;
  CHECK_FALSE(bench::find_change(values_of(over)));
  CHECK_FALSE(bench::find_change(values_of(noisy(7, 9, 10, 5, 2))));
  const std::string text = bench::history_text(noisy(3, 40, 10, 28, 1.1));
  CHECK(text.find("step_ms of c.yaml") != std::string::npos);
  CHECK(text.find("worse by ") != std::string::npos);
}

TEST_CASE("the gate pairs what was measured in turns", "[history]") {
  const auto one = [](const std::vector<HistoryEntry>& a, const std::vector<HistoryEntry>& b,
                      double allowed) { return bench::gate(a, b, allowed).front(); };
  int found = 0, alarms = 0;
  constexpr int trials = 100;
  for (uint64_t t = 0; t < trials; ++t) {
    const auto a = noisy(t, 30, 10), same = noisy(500 + t, 30, 10), slow = noisy(900 + t, 30, 10.5);
    found += one(a, slow, 0.025).verdict == GateRow::Verdict::regression ? 1 : 0;
    alarms += one(a, same, 0.025).verdict == GateRow::Verdict::regression ? 1 : 0;
  }
  CHECK(found >= 95);
  CHECK(alarms <= 1);
  // Pairs of a disturbed machine are left out; with fewer than five the gate says so.
  std::vector<HistoryEntry> a(6, entry(10)), b(6, entry(20, 0.5e9));
  b[0] = entry(10);
  CHECK(one(a, b, 0.05).pairs == 1);
  CHECK(one(a, b, 0.05).verdict == GateRow::Verdict::unclear);
  CHECK(bench::text(std::vector{one(a, b, 0.05)}).find("1 of at least 5 pairs") != std::string::npos);
  // Bytes are exact: one pair decides.
  const std::vector<HistoryEntry> bytes{entry(1000, 0)}, more{entry(1020, 0)}, little{entry(1005, 0)};
  CHECK(one(bytes, more, 0.05).verdict == GateRow::Verdict::regression);
  CHECK(one(bytes, little, 0.05).verdict == GateRow::Verdict::ok);
  std::vector<HistoryEntry> elsewhere{entry(10)};
  elsewhere[0].machine = "other";
  CHECK_THROWS_AS(bench::gate(a, elsewhere, 0.05), Error);
}
