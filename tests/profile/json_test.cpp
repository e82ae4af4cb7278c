// profile.json: it comes back as it was, and what is no profile is refused.

#include "apps/profile/json.h"

#include <filesystem>
#include <fstream>
#include <string>

#include "apps/profile/analyze.h"
#include "core/base/error.h"
#include "core/base/philox.h"
#include "core/io/atomic_file.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"
#include "tests/profile/synthetic.h"

using namespace nrl;
using namespace nrl::test;
using profile::Profile;

namespace {

profile::RankProfile rank_profile(int rank) {
  Synthetic s(2);
  s.recorded.rank = rank;
  s.recorded.host = "node0";
  s.recorded.device = "cpu";
  s.buffer("weights", memory::Category::weights, 1024);
  s.buffer("a", memory::Category::activations, 512, {{0, 0}});
  s.recorded.arena_bytes = 1536;
  for (int step = 0; step < 2; ++step) {
    const size_t op = s.open("linear_forward", trace::Kind::op, s.cost(30'000, 4'000, 6'000), 0);
    s.idle((50 + rank) * Synthetic::us);
    s.close(op);
    s.collective(7 * Synthetic::us, 20 * Synthetic::us);
    s.end_step();
  }
  return profile::analyze(s.recorded);
}

Profile sample(int ranks) {
  std::vector<profile::RankProfile> all;
  for (int r = 0; r < ranks; ++r) all.push_back(rank_profile(r));
  profile::RunFacts facts{.version = "0.1.0",
                          .command = "nrl-train train a.yaml",
                          .started = "2026-01-02T03:04:05Z",
                          .config = "policy: {}\n",
                          .world = ranks};
  facts.first_step = 5;
  facts.last_step = 6;
  facts.tokens_per_step = 4096;
  facts.flops_per_step = 1e9;
  Profile p = profile::merge(std::move(all), std::move(facts));
  p.findings.push_back({.type = "exposed_gradients",
                        .text = "a \"sentence\"",
                        .value = 12.5,
                        .severity = profile::Severity::high,
                        .seconds = 0.25,
                        .overrides = {"distributed.overlap_grad_reduce=true"},
                        .predicted_s = 0.75,
                        .model_error = 0.03,
                        .changes_numbers = true});
  return p;
}

Profile back(const std::string& text) {
  return profile::profile_from(parse_json(text, "profile.json"));
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}

std::string refusal(const std::string& text) {
  try {
    back(text);
  } catch (const Error& e) {
    CHECK(e.code() == Exit::data);
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("a profile comes back as it was written", "[profile]") {
  const Profile p = sample(2);
  const std::string text = profile::to_json(p).dump();
  const Profile q = back(text);
  CHECK(profile::to_json(q).dump() == text);
  CHECK(q.facts.config == p.facts.config);
  CHECK(q.ranks[1].memory.curve == p.ranks[1].memory.curve);
  CHECK(q.findings[0].overrides == p.findings[0].overrides);
  CHECK(q.ranks[1].split.late == p.ranks[1].split.late);
  const std::string rank = profile::to_json(p.ranks[1]).dump();
  CHECK(profile::to_json(profile::rank_from(parse_json(rank, "rank"))).dump() == rank);
}

TEST_CASE("the names of other profilers are in the JSON", "[profile]") {
  const JsonValue json = profile::to_json(sample(2));
  const JsonValue &memory = json.at("memory"), &summary = json.at("summary");
  CHECK(memory.get_int("peak_allocated") == 1536);
  CHECK(memory.get_int("total_allocations") == 2);
  CHECK(memory.get_int("memory_leak_bytes") == 0);
  CHECK(memory.get_double("memory_efficiency") == Approx(memory.get_double("avg_allocated") / 1536));
  CHECK(summary.get_double("gpu_utilization") == Approx(100 * 51.0 / 78));
  CHECK(summary.get_double("communication_overhead_percent") == Approx(100 * 27.0 / 78));
  CHECK(summary.get_int("communication_operations") == 1);
  CHECK(json.at("bottlenecks").items()[0].get_string("severity") == "high");
}

TEST_CASE("a profile of many ranks is small", "[profile]") {
  const Profile p = sample(1024);
  const std::string text = profile::to_json(p).dump();
  CHECK(text.size() < (size_t{2} << 20));
  const Profile q = back(text);
  REQUIRE(q.ranks.size() == 1024);
  CHECK(q.ranks[500].operations.empty());
  CHECK_FALSE(q.ranks[0].operations.empty());
  CHECK_FALSE(q.ranks[1023].operations.empty());  // it has most work
  CHECK(q.ranks[500].memory.peak == 1536);
}

TEST_CASE("another version is refused with both numbers", "[profile]") {
  const std::string text = profile::to_json(sample(1)).dump();
  const std::string newer = refusal(replaced(text, "\"version\":2", "\"version\":3"));
  CHECK(newer.find("has version 3; this nrl-train reads version 2") != std::string::npos);
  CHECK(refusal(replaced(text, "nrl-train-profile", "chrome")).find("schema is 'chrome'") !=
        std::string::npos);
}

TEST_CASE("a malformed profile is refused with its position", "[profile]") {
  const std::string text = profile::to_json(sample(1)).dump();
  for (const auto& [from, to, message] :
       {std::tuple{"\"wall\":", "\"well\":", "the key \"wall\" is missing"},
        {"\"rank\":0", "\"rank\":-1", "out of range"},
        {"\"rank\":0", "\"rank\":4294967296", "out of range"},
        {"\"bound\":\"arithmetic\"", "\"bound\":\"luck\"", "'luck' is no known value"},
        {"\"category\":\"weights\"", "\"category\":\"w\"", "no category of memory"},
        {"\"host\":\"node0\"", "\"host\":7", "expected a string"},
        {"\"cores\":0", "\"cores\":0,\"corse\":1", "\"corse\" is no member"},
        {"\"summary\":", "\"summery\":", "is missing"},
        {"\"curve\":[[0.0,", "\"curve\":[[0.0,1,", "a point of memory has 8 numbers; expected 7"}}) {
    CAPTURE(from, to);
    const std::string wrong = refusal(replaced(text, from, to));
    CHECK(wrong.find(message) != std::string::npos);
    CHECK(wrong.find("profile.json:1:") != std::string::npos);
  }
}

TEST_CASE("damaged profiles are refused or read, and never crash", "[profile]") {
  const std::string text = profile::to_json(sample(1)).dump();
  const PhiloxStream random(1, "damage");
  for (uint64_t i = 0; i < 2000; ++i) {
    std::string damaged = text;
    for (uint64_t k = 0; k < 1 + i % 3; ++k)
      damaged[random.bits(8 * i + 2 * k) % damaged.size()] =
          "0123456789-+.eE\"[]{},:ntf"[random.bits(8 * i + 2 * k + 1) % 25];
    if (i % 7 == 0) damaged.resize(random.bits(8 * i + 7) % damaged.size());
    try {
      (void)profile::to_json(back(damaged)).dump();
    } catch (const Error& e) {
      CHECK(e.code() == Exit::data);
    }
  }
}

TEST_CASE("a profile is found by its file, directory or log directory", "[profile]") {
  const std::string base = (std::filesystem::temp_directory_path() / "nrl_profile_found").string();
  std::filesystem::remove_all(base);
  for (const char* step : {"step-3", "step-20", "other"}) {
    std::filesystem::create_directories(base + "/profile/" + step);
    Profile p = sample(1);
    p.facts.first_step = std::string(step) == "step-20" ? 20 : 3;
    std::ofstream(base + "/profile/" + step + "/profile.json") << profile::to_json(p).dump();
  }
  CHECK(profile::load_profile(base).facts.first_step == 20);
  CHECK(profile::load_profile(base + "/profile").facts.first_step == 20);
  CHECK(profile::load_profile(base + "/profile/step-3").facts.first_step == 3);
  CHECK(profile::load_profile(base + "/profile/step-3/profile.json").facts.first_step == 3);
  try {
    (void)profile::load_profile(base + "/nothing");
    FAIL("found");
  } catch (const Error& e) {
    CHECK(e.code() == Exit::no_input);
    CHECK(std::string(e.what()).find("no profile.json. Fix: give LOG_DIR/profile/step-N") !=
          std::string::npos);
  }
  std::filesystem::remove_all(base);
}

TEST_CASE("steps of bench are read as a profile", "[profile]") {
  const nrl::test::TemporaryDirectory directory;
  const std::string path = directory / "bench.json";
  const auto load = [&](const std::string& bench, const std::string& timed, const std::string& ms,
                        const std::string& tokens = "64") {
    nrl::write_file_atomic(path, "{\"bench\":\"" + bench +
                                     "\",\"program\":\"nrl-train 0.1.0\",\"device\":{\"name\":\"a CPU\"}," +
                                     "\"tokens_per_step\":" + tokens +
                                     ",\"planned_bytes\":1000,\"timed_steps\":" + timed +
                                     ",\"rows\":[{\"step_ms\":9},{\"step_ms\":" + ms + "},{\"step_ms\":4}]}");
    return nrl::profile::load_steps(path);
  };
  const nrl::profile::Profile p = load("step", "2", "2");
  CHECK(p.ranks.at(0).step_s == std::vector<double>{0.002, 0.004});
  CHECK(p.split.wall == Approx(0.003));
  CHECK(p.facts.tokens_per_step == 64);
  CHECK(p.ranks[0].memory.peak == 1000);
  CHECK(p.ranks[0].device == "a CPU");
  CHECK_THROWS_AS(load("gemm", "2", "2"), nrl::Error);
  CHECK_THROWS_AS(load("step", "4", "2"), nrl::Error);
  CHECK_THROWS_AS(load("step", "0", "2"), nrl::Error);
  CHECK_THROWS_AS(load("step", "2", "-2"), nrl::Error);
  CHECK_THROWS_AS(load("step", "2", "\"x\""), nrl::Error);
  CHECK_THROWS_AS(load("step", "2", "2", "0"), nrl::Error);
  nrl::write_file_atomic(path, "{\"bench\":\"step\"}");
  CHECK_THROWS_AS(nrl::profile::load_steps(path), nrl::Error);
}
