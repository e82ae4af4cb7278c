// Two profiles beside each other, and the gate.

#include "apps/profile/compare.h"

#include <cmath>
#include <string>
#include <vector>

#include "apps/profile/analyze.h"
#include "core/base/error.h"
#include "core/base/philox.h"
#include "core/config/load.h"
#include "tests/catch.h"

using namespace nrl;
using profile::Gate;
using profile::Profile;

namespace {

std::string config_with(int batch, const std::string& more = "") {
  return "policy:\n  model: {model_type: llama, vocab_size: 61, hidden_size: 16, intermediate_size: 24,\n"
         "    num_hidden_layers: 2, num_attention_heads: 2}\n  train_global_batch_size: " +
         std::to_string(batch) +
         "\n  max_total_sequence_length: 8\npretrain: {max_num_steps: 4}\ndata: {train: {data_path: none}" +
         more + "}\n";
}

// Seconds of steps on a machine that is not idle: neighbors depend on each other, and some are slow.
std::vector<double> step_times(uint64_t trial, const char* name, double seconds) {
  const PhiloxStream random(trial, name);
  std::vector<double> out;
  double drift = random.normal(1'000'000);
  for (size_t i = 0; i < 200; ++i) {
    drift = 0.5 * drift + std::sqrt(0.75) * random.normal(i);
    const bool slow = random.uniform(2'000'000 + i) < 0.05F;
    out.push_back(seconds * (1 + 0.02 * drift) * (slow ? 1.3 : 1));
  }
  return out;
}

Profile sample(double compute, double wire, int64_t tokens = 1000) {
  profile::RankProfile r;
  r.host = "node0";
  r.device = "cpu";
  r.split.wall = compute + wire + 0.001;
  r.split.compute = compute;
  r.split.wire = wire;
  r.split.unattributed = 0.001;
  r.step_s.assign(20, r.split.wall);
  r.operations = {
      {.name = "linear_forward", .part = "layer GEMMs, forward", .calls = 4, .seconds = 0.7 * compute},
      {.name = "norm_forward", .part = "norms, forward", .calls = 4, .seconds = 0.3 * compute}};
  r.memory.peak = 1 << 20;
  profile::RunFacts facts;
  facts.version = "0.1.0";
  facts.tokens_per_step = tokens;
  facts.config = config_with(8);
  return profile::merge({r}, facts);
}

std::string refusal(const Profile& a, const Profile& b) {
  try {
    (void)profile::compare(a, b);
  } catch (const Error& e) {
    CHECK(e.code() == Exit::usage);
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("differences of parts and operations add up to the step's", "[profile]") {
  const Profile a = sample(0.080, 0.020), b = sample(0.090, 0.005, 1500);
  const profile::Comparison c = profile::compare(a, b);
  const double step = b.split.wall - a.split.wall;
  double parts = 0, operations = 0;
  for (const profile::Change& change : c.split) parts += change.difference();
  for (const profile::Change& change : c.operations) operations += change.difference();
  CHECK(parts == Approx(step));
  CHECK(operations == Approx(step));
  CHECK(c.split[0].name == "wire");
  CHECK(c.split[0].difference() == Approx(-0.015));
  const profile::Metric& ms = c.metric("step_ms");
  CHECK(ms.before == Approx(101));
  CHECK(ms.after == Approx(96));
  CHECK(ms.worse() == Approx(-5 / 101.0));
  CHECK(ms.worse_interval().width() == Approx(0).margin(1e-12));
  const profile::Metric& speed = c.metric("tokens_per_s");
  CHECK(speed.worse() == Approx((1000 / 0.101) / (1500 / 0.096) - 1));
  CHECK(speed.worse_interval().low == Approx(speed.worse()));
  CHECK_THROWS_AS(c.metric("luck"), Error);
}

TEST_CASE("configurations differ in the keys that have other values", "[profile]") {
  const ConfigResult a = load_config_text(config_with(8, ", num_workers: 1"), "a"),
                     b = load_config_text(config_with(16), "b");
  INFO(render(a.diagnostics));
  REQUIRE(a.ok());
  REQUIRE(b.ok());
  CHECK(differences(a, a).empty());
  const std::vector<KeyDifference> keys = differences(a, b);
  REQUIRE(keys.size() == 1);  // one worker is the default
  CHECK(keys[0].key == "policy.train_global_batch_size");
  CHECK(keys[0].a == "8");
  CHECK(keys[0].b == "16");
}

TEST_CASE("what changed is named", "[profile]") {
  Profile a = sample(0.08, 0.02), b = a;
  b.facts.config = config_with(16);
  b.facts.version = "0.2.0";
  b.facts.world = 2;
  const std::string text = profile::text(profile::compare(a, b));
  CHECK(text.find("policy.train_global_batch_size  8") != std::string::npos);
  CHECK(text.find("0.2.0") != std::string::npos);
  CHECK(text.find("ranks") != std::string::npos);
  CHECK(profile::text(profile::compare(a, a)).find("nothing that the profiles hold") != std::string::npos);
  b.facts.config = "no_such_key: 1\n";
  CHECK(profile::compare(a, b).unreadable.find("optimized run does not load") != std::string::npos);
}

TEST_CASE("runs of different machines are refused", "[profile]") {
  const Profile a = sample(0.08, 0.02);
  Profile b = a;
  b.ranks[0].device = "H100";
  CHECK(refusal(a, b).find("--other-machine") != std::string::npos);
  CHECK(refusal(a, b).find("H100") != std::string::npos);
  b = a;
  b.ranks[0].host = "node1";
  CHECK(refusal(a, b).find("node1") != std::string::npos);
  CHECK_NOTHROW(profile::compare(a, b, true));
}

TEST_CASE("the gate's verdict at both sides of each bound", "[profile]") {
  CHECK(profile::judge(0.101, {0.05, 0.15}, 0.10) == Gate::regression);
  CHECK(profile::judge(0.099, {0.05, 0.149}, 0.10) == Gate::ok);       // within, and narrow
  CHECK(profile::judge(0.101, {-0.01, 0.25}, 0.10) == Gate::unclear);  // beyond, but perhaps nothing
  CHECK(profile::judge(0.02, {-0.05, 0.12}, 0.10) == Gate::unclear);
  CHECK(profile::judge(0.02, {-0.05, 0.09}, 0.10) == Gate::ok);  // wide, but not as bad as allowed
  CHECK(profile::judge(-0.2, {-0.25, -0.15}, 0.10) == Gate::ok);
  CHECK(profile::judge(0.001, {0.001, 0.001}, 0) == Gate::regression);  // an exact figure
  CHECK(profile::judge(0, {0, 0}, 0) == Gate::ok);
}

TEST_CASE("a planted regression of 5 % is found, and none where there is none", "[profile]") {
  int found = 0, false_alarms = 0;
  constexpr int trials = 400;
  for (uint64_t trial = 0; trial < trials; ++trial) {
    const std::vector<double> a = step_times(trial, "a", 0.1);
    for (const double planted : {0.0, 0.05}) {
      const std::vector<double> b = step_times(trial, planted > 0 ? "slow" : "same", 0.1 * (1 + planted));
      const Interval ratio = ratio_interval(a, b, {.resamples = 500});
      const double worse = median(b) / median(a) - 1;
      const bool regression =
          profile::judge(worse, {ratio.low - 1, ratio.high - 1}, 0.025) == Gate::regression;
      (planted > 0 ? found : false_alarms) += regression;
    }
  }
  CHECK(found >= 0.95 * trials);
  CHECK(false_alarms <= 0.01 * trials);
}

TEST_CASE("the gate says what to do", "[profile]") {
  const Profile a = sample(0.08, 0.02), b = sample(0.10, 0.02);
  const profile::Comparison c = profile::compare(a, b);
  const std::string text = profile::gate_text(c, c.metric("step_ms"), 0.10);
  CHECK(text.find("regression; most of it: linear_forward +14.00 ms") != std::string::npos);
  profile::Comparison wide = c;
  wide.metrics[0].ratio = {0.9, 1.3};
  CHECK(profile::gate_text(wide, wide.metrics[0], 0.10).find("unclear. Fix: profile about 320 steps") !=
        std::string::npos);
  CHECK(profile::gate_text(c, c.metric("peak_memory_bytes"), 0).ends_with("ok"));
  const JsonValue json = profile::to_json(c);
  CHECK(json.at("metrics").items()[0].get_double("improvement_percent") == Approx(-100 * 0.02 / 0.101));
}

TEST_CASE("a later window that is slower names the part that grew", "[profile]") {
  const Profile first = sample(0.08, 0.02);
  CHECK(profile::slower_text(first, first, 0.1).empty());
  CHECK(profile::slower_text(first, sample(0.085, 0.02), 0.1).empty());  // 5 %
  CHECK(profile::slower_text(first, sample(0.06, 0.02), 0.1).empty());
  CHECK(profile::slower_text(first, sample(0.082, 0.04), 0.1) ==
        "steps take 123 ms, 101 ms in the first window (+21.8 %); most of it: wire +20 ms");
}

TEST_CASE("a change that a verdict named is compared with its prediction", "[profile]") {
  Profile before = sample(0.1, 0.02), after = sample(0.09, 0.02);
  after.facts.config = config_with(8, ", num_workers: 3, prefetch_batches: 4");
  before.facts.config += "logger: {log_dir: a}\n";
  profile::Comparison c = profile::compare(before, after);
  CHECK(profile::changes_runs(c));
  std::vector<profile::Finding> findings(3);
  findings[0].predicted_s = 0.01;  // no key
  findings[1].overrides = {"data.num_workers=2"};
  findings[1].predicted_s = 0.02;
  findings[2].overrides = {"data.num_workers=3"};
  findings[2].predicted_s = 0.111;
  c.prediction = profile::prediction_of(findings, c);
  CHECK(c.prediction.overrides == findings[2].overrides);
  CHECK(profile::text(c).find("data.num_workers=3: predicted -8.3 %, measured -8.3 %") != std::string::npos);
  CHECK(profile::to_json(c).at("predicted_step_s").as_double() == 0.111);
  findings[2].overrides.push_back("policy.precision=bfloat16");  // was not made
  CHECK(profile::prediction_of(findings, c).overrides.empty());
  after.facts.config = config_with(8) + "logger: {log_dir: b}\n";
  CHECK_FALSE(profile::changes_runs(profile::compare(before, after)));
}

TEST_CASE("a comparison as a page", "[profile]") {
  Profile before = sample(0.1, 0.02), after = sample(0.09, 0.02);
  before.ranks[0].operations[0].name = after.ranks[0].operations[0].name = "<b>&";
  after.facts.config = config_with(8, ", num_workers: 3");
  profile::Comparison c = profile::compare(before, after);
  c.prediction = {.overrides = {"data.num_workers=3"}, .step_s = 0.111};
  const std::string page = profile::html_page(c);
  CHECK(page.find("<td>step_ms</td><td>121.00</td><td>111.00</td><td>+8.3 %</td>") != std::string::npos);
  CHECK(page.find("data.num_workers=3: predicted -8.3 %, measured -8.3 %") != std::string::npos);
  CHECK(page.find("<td>&lt;b&gt;&amp;</td>") != std::string::npos);
  CHECK(page.find("<b>") == std::string::npos);
  CHECK(page.find("<script") == std::string::npos);
  CHECK(page.ends_with("</html>\n"));
}
