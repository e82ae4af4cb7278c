// How tables of rules are judged; tests/train/run_check_test.cpp has the rules themselves.

#include "apps/check/rule.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::check;

namespace {

ConfigResult config_of(const std::vector<std::string>& overrides = {}) {
  return load_config_text(
      "policy: {model: {model_type: llama}, train_global_batch_size: 8}\n"
      "pretrain: {max_num_steps: 10}\n"
      "data: {train: {data_path: corpus}}\n",
      "t.yaml", overrides);
}

std::vector<Rule> rules_of(std::vector<std::string> keys, const Broken& broken) {
  return {{std::move(keys), [broken](const Facts&) -> Verdict { return {broken}; }}};
}

}  // namespace

TEST_CASE("a broken rule is reported at its first key, with its remedy", "[check]") {
  const ConfigResult result = config_of();
  const Facts facts{.result = result};
  const std::vector<Rule> rules = rules_of({"policy.train_global_batch_size", "data.train.data_path"},
                                           {.reason = "is odd", .remedy = {"use 9"}, .exit = Exit::no_input});
  const Diagnostics found = judge(rules, facts);
  REQUIRE(found.size() == 1);
  CHECK(found[0].key == "policy.train_global_batch_size");
  CHECK(found[0].message == "is odd");
  CHECK(found[0].notes == std::vector<std::string>{"use 9"});
  CHECK((found[0].line == 1 && found[0].exit == Exit::no_input));
  CHECK(judge(rules_of({"policy.train_global_batch_size"}, {.reason = "x", .key = "data.train.data_path"}),
              facts)[0]
            .line == 3);
  CHECK(judge(std::vector<Rule>{{{}, [](const Facts&) { return Verdict{}; }}}, facts).empty());
}

TEST_CASE("a rule of a key without a valid value is not judged", "[check]") {
  const ConfigResult result = config_of({"policy.optimizer.lr=fast"});
  REQUIRE_FALSE(result.ok());
  const Facts facts{.result = result};
  CHECK(judge(rules_of({"policy.train_global_batch_size", "policy.optimizer.lr"}, {.reason = "x"}), facts)
            .empty());
  CHECK(judge(rules_of({"policy.train_global_batch_size"}, {.reason = "x"}), facts).size() == 1);
}

TEST_CASE("a key without effect is reported where it was given", "[check]") {
  const ConfigResult result = config_of();
  const Facts facts{.result = result};
  const Broken idle{.reason = "has no effect", .idle = true};
  CHECK(judge(rules_of({"policy.optimizer.lr"}, idle), facts).empty());
  CHECK(judge(rules_of({"policy.train_global_batch_size"}, idle), facts).size() == 1);
  // A warning if the file turns off what the key needs.
  CHECK(judge(rules_of({"policy.train_global_batch_size", "pretrain.max_num_steps"}, idle), facts)[0]
            .severity == Severity::warning);
}

TEST_CASE("all ways in which rules are broken are reported, in the order of the table", "[check]") {
  const ConfigResult result = config_of();
  std::vector<Rule> rules = rules_of({"policy.train_global_batch_size"}, {.reason = "first"});
  rules.push_back({{}, [](const Facts&) -> Verdict {
                     return {{.reason = "second", .place = "environment: A=1"},
                             {.reason = "third", .place = "environment: B=1"}};
                   }});
  const Diagnostics found = judge(rules, Facts{.result = result});
  REQUIRE(found.size() == 3);
  CHECK(found[0].message == "first");
  CHECK((found[1].message == "second" && found[1].file == "environment: A=1"));
  CHECK((found[2].message == "third" && found[2].key.empty()));
}
