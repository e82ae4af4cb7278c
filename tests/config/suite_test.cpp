// Suites of comparisons.
#include "core/config/suite.h"

#include "tests/catch.h"
#include "tests/config/helpers.h"

using namespace nrl;
using namespace nrl::test;

namespace {

const std::string two_variants =
    "comparisons:\n"
    "  - name: c\n"
    "    variants: [{name: a}, {name: b, set: {policy.precision: bfloat16}}]\n";
const std::string promise =
    "    promises:\n      - {claim: x, source: y, promised: z, measure: speed, variant: b";

/// The problems as "file:line:column message (label) [notes]".
std::vector<std::string> problems(const std::string& text) {
  std::vector<std::string> out;
  for (const Diagnostic& d : load_suite_text(text, "s.yaml").diagnostics) {
    std::string line = fmt::format("{}:{}:{} {}", d.file, d.line, d.column, d.message);
    if (const size_t hint = d.excerpt.find("did you mean"); hint != std::string::npos)
      line += " (" + d.excerpt.substr(hint, d.excerpt.find('?', hint) + 1 - hint) + ")";
    for (const std::string& note : d.notes) line += " [" + note + "]";
    out.push_back(line);
  }
  return out;
}
using Problems = std::vector<std::string>;

}  // namespace

TEST_CASE("a suite is read", "[config][suite]") {
  const Suite suite = load_suite_text(
      "config: ../base.yaml\n"
      "comparisons:\n"
      "  - name: first\n"
      "    note: A note.\n"
      "    ranks: 2\n"
      "    reset: [policy.checkpoint_ratio, policy.recompute]\n"
      "    promises:\n"
      "      - {claim: it costs time, source: a guide, promised: 30 %, measure: step_time, variant: b}\n"
      "      - {claim: it is smaller, source: us, promised: half, measure: planned_bytes, variant: a, than: "
      "b,\n"
      "         at_least: 0.4, at_most: 0.6, device: cuda}\n"
      "    variants:\n"
      "      - name: a\n"
      "      - name: b\n"
      "        set:\n"
      "          policy.precision: bf16\n"
      "          policy.optimizer: {lr: 2e-4, betas: [0.9, 0.95]}\n"
      "  - name: second\n"
      "    config: ../moe.yaml\n"
      "    variants: [{name: \"a: b\"}]\n"
      "    promises: [{claim: c, source: us, promised: none, measure: speed, variant: \"a: b\", low: 1, "
      "high: 2,\n"
      "                device: cuda}]\n",
      "suites/s.yaml");
  INFO(render(suite.diagnostics));
  REQUIRE(suite.diagnostics.empty());
  CHECK(suite.config == "base.yaml");
  REQUIRE(suite.comparisons.size() == 2);
  const SuiteComparison& c = suite.comparisons[0];
  CHECK(c.name == "first");
  CHECK(c.note == "A note.");
  CHECK(c.ranks == 2);
  CHECK(c.reset.front() == "policy.checkpoint_ratio=null");
  CHECK(std::count_if(c.reset.begin(), c.reset.end(),
                      [](const std::string& r) { return r.starts_with("policy.recompute."); }) > 1);
  REQUIRE(c.variants.size() == 2);
  CHECK(c.variants[0].overrides.empty());
  CHECK(c.variants[1].overrides == Problems{"policy.optimizer.betas=[0.9, 0.95]", "policy.optimizer.lr=2e-04",
                                            "policy.precision=bfloat16"});
  REQUIRE(c.promises.size() == 2);
  CHECK(c.promises[0].variant == 1);
  CHECK(c.promises[0].than == 0);
  CHECK(c.promises[0].quantity == Quantity::step_time);
  CHECK(!c.promises[0].at_least);
  CHECK(!c.promises[0].at_most);
  CHECK(c.promises[0].device == DeviceKind::automatic);
  CHECK(c.promises[1].variant == 0);
  CHECK(c.promises[1].than == 1);
  CHECK(c.promises[1].at_least == 0.4);
  CHECK(c.promises[1].at_most == 0.6);
  CHECK(c.promises[1].device == DeviceKind::cuda);
  CHECK(!c.promises[1].low);
  CHECK(c.config.empty());
  CHECK(suite.comparisons[1].config == "moe.yaml");
  CHECK(suite.comparisons[1].promises[0].low == 1);
  CHECK(suite.comparisons[1].promises[0].high == 2);
  CHECK(suite.comparisons[1].ranks == 1);
  CHECK(suite.comparisons[1].variants[0].name == "a: b");
}

TEST_CASE("a variant's overrides are read back as given", "[config][suite]") {
  const Suite suite = load_suite_text(
      "comparisons:\n"
      "  - name: c\n"
      "    variants:\n"
      "      - name: v\n"
      "        set: {policy.recompute.modules: [norm, activation], policy.offload_optimizer: 0.5,\n"
      "              policy.model: {hidden_size: 64, rope_theta: 5e5}, pretrain.max_num_steps: 1k}\n",
      "s.yaml");
  INFO(render(suite.diagnostics));
  REQUIRE(suite.ok());
  CHECK(suite.config.empty());
  const ConfigResult config = load_base(suite.comparisons[0].variants[0].overrides);
  INFO(render(config.diagnostics));
  REQUIRE(config.ok());
  CHECK(config.config.policy.recompute.modules.value().size() == 2);
  CHECK(config.config.policy.offload_optimizer.value == 0.5);
  CHECK(config.config.pretrain.max_num_steps == 1000);
  CHECK(contains(config.config.policy.model_json, "\"hidden_size\": 64"));
}

TEST_CASE("problems of a suite are named with their position", "[config][suite]") {
  CHECK(problems(two_variants).empty());
  CHECK(problems(two_variants + promise + "}\n").empty());
  CHECK(problems("config: a.yaml\n") == Problems{"s.yaml:1:1 a suite has no comparisons"});
  CHECK(problems("comparisons: 3\n") == Problems{"s.yaml:1:14 comparisons: expected a list of mappings"});
  CHECK(problems("comparisons: []\n") == Problems{"s.yaml:1:14 comparisons: expected a list of mappings"});
  CHECK(problems("comparisons: [x]\n") == Problems{"s.yaml:1:15 a comparison: expected a mapping [keys here: "
                                                   "name, note, config, ranks, reset, variants, "
                                                   "promises]"});
  CHECK(problems("comparison: []\n") ==
        Problems{"s.yaml:1:1 unknown key 'comparison' (did you mean 'comparisons'?) [keys here: config, "
                 "comparisons]",
                 "s.yaml:1:1 a suite has no comparisons"});
  CHECK(problems("comparisons:\n  - name: c\n") == Problems{"s.yaml:2:5 a comparison has no variants"});
  CHECK(problems("comparisons:\n  - variants: [{name: a}]\n    ranks: 0\n") ==
        Problems{"s.yaml:3:12 ranks: '0' is out of range", "s.yaml:2:5 a comparison has no name"});
  CHECK(problems("comparisons:\n  - name: [c]\n    variants: [{name: a}, {name: a}, {nam: b}]\n") ==
        Problems{"s.yaml:2:11 name: expected text, found a list", "s.yaml:3:34 the name 'a' is given twice",
                 "s.yaml:3:39 unknown key 'nam' (did you mean 'name'?) [keys here: name, set]",
                 "s.yaml:3:38 a variant has no name"});
  CHECK(problems(two_variants + "  - {name: c, variants: [{name: a}]}\n") ==
        Problems{"s.yaml:4:12 the name 'c' is given twice"});
  CHECK(
      problems(two_variants + "    reset: [policy.checkpoint_rato]\n") ==
      Problems{"s.yaml:4:13 unknown key 'policy.checkpoint_rato' (did you mean 'policy.checkpoint_ratio'?)"});
}

TEST_CASE("keys of variants are checked like keys of a configuration", "[config][suite]") {
  const auto with = [](const std::string& set) {
    return problems("comparisons:\n  - name: c\n    variants:\n      - name: a\n        set: " + set + "\n");
  };
  CHECK(with("{policy.precision: bfloat16}").empty());
  CHECK(with("[a]") == Problems{"s.yaml:5:14 set: expected a mapping [write section.key: value]"});
  const Problems unknown = with("{policy.precison: bfloat16}");
  REQUIRE(unknown.size() == 1);
  CHECK(unknown[0].starts_with("s.yaml:5:15 unknown key 'policy.precison' (did you mean 'precision'?)"));
  CHECK(with("{policy.precision: bfloat17}") ==
        Problems{"s.yaml:5:33 policy.precision: expected auto | float32 | bfloat16 | float16 | fastest, "
                 "found 'bfloat17' (did you mean 'bfloat16'?)"});
  CHECK(with("{policy: {optimizer: {lr: fast}}}") ==
        Problems{"s.yaml:5:40 policy.optimizer.lr: expected number above 0 to 1000, found 'fast'"});
}

TEST_CASE("promises name variants and limits that can be judged", "[config][suite]") {
  const auto with = [](const std::string& more) { return problems(two_variants + promise + more + "}\n"); };
  CHECK(with(", than: a, at_most: 2").empty());
  CHECK(with(", than: c") ==
        Problems{"s.yaml:5:78 there is no variant 'c' (did you mean 'a'?) [variants here: a, b]"});
  CHECK(with(", at_least: 2, at_most: 1") == Problems{"s.yaml:5:94 at_most: 1 is less than at_least"});
  CHECK(with(", at_most: -1") == Problems{"s.yaml:5:81 at_most: '-1' is out of range"});
  CHECK(with(", device: cpu") ==
        Problems{"s.yaml:5:80 device has no effect without at_least, at_most, low or high"});
  CHECK(problems(two_variants + "    promises: [{claim: x, measure: time}]\n") ==
        Problems{"s.yaml:4:36 measure: expected step_time | speed | planned_bytes | activation_bytes | "
                 "optimizer_bytes | sent_bytes, found 'time'",
                 "s.yaml:4:16 a promise has no source", "s.yaml:4:16 a promise has no promised",
                 "s.yaml:4:16 a promise has no variant"});
}

TEST_CASE("a suite that is missing or is no YAML is refused", "[config][suite]") {
  const Suite missing = load_suite("nowhere.yaml");
  REQUIRE(missing.diagnostics.size() == 1);
  CHECK(exit_code(missing.diagnostics) == Exit::no_input);
  CHECK(missing.diagnostics[0].file == "nowhere.yaml");
  const Problems broken = problems("comparisons: [\n");
  REQUIRE(broken.size() == 1);
  CHECK(broken[0].starts_with("s.yaml:1:14 "));
}
