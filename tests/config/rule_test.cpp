// How tables of rules are judged; bad_input_test.cpp and tests/train/run_check_test.cpp have the rules
// themselves.

#include "core/config/rule.h"

#include "core/config/rules/tables.h"
#include "tests/catch.h"

using namespace nrl;

namespace {

ConfigResult rule_config(const std::vector<std::string>& overrides = {}) {
  return load_config_text(
      "policy: {model: {model_type: llama}, train_global_batch_size: 8}\n"
      "pretrain: {max_num_steps: 10}\n"
      "data: {train: {data_path: corpus}}\n",
      "t.yaml", overrides);
}

struct ConfigFacts {
  const ConfigResult& result;
};

std::vector<Rule<ConfigFacts>> broken_rule(std::vector<std::string> keys, const Broken& broken) {
  return {{std::move(keys), [broken](const ConfigFacts&) -> Verdict { return {broken}; }}};
}

}  // namespace

TEST_CASE("a broken rule is reported at its first key, with its remedy", "[config]") {
  const ConfigResult result = rule_config();
  const ConfigFacts facts{result};
  const auto rules = broken_rule({"policy.train_global_batch_size", "data.train.data_path"},
                                 {.reason = "is odd", .remedy = {"use 9"}, .exit = Exit::no_input});
  const Diagnostics found = judge(rules, facts);
  REQUIRE(found.size() == 1);
  CHECK(found[0].key == "policy.train_global_batch_size");
  CHECK(found[0].message == "is odd");
  CHECK(found[0].notes == std::vector<std::string>{"use 9"});
  CHECK((found[0].line == 1 && found[0].exit == Exit::no_input));
  CHECK(judge(broken_rule({"policy.train_global_batch_size"}, {.reason = "x", .key = "data.train.data_path"}),
              facts)[0]
            .line == 3);
  CHECK(judge(broken_rule({"loop.max_num_steps"}, {.reason = "x"}), facts)[0].line == 2);
}

TEST_CASE("a rule of a key without a valid value is not judged", "[config]") {
  const ConfigResult result = rule_config({"policy.optimizer.lr=fast", "pretrain.max_num_epochs=many"});
  REQUIRE_FALSE(result.ok());
  const ConfigFacts facts{result};
  const auto problems = [&](std::vector<std::string> keys, std::string reported = "") {
    return judge(broken_rule(std::move(keys), {.reason = "x", .key = std::move(reported)}), facts).size();
  };
  CHECK(problems({"policy.train_global_batch_size", "policy.optimizer.lr"}) == 0);
  CHECK(problems({"policy.train_global_batch_size", "loop.max_num_epochs"}) == 0);
  CHECK(problems({"policy.train_global_batch_size"}, "policy.optimizer.lr") == 0);
  CHECK(problems({"policy.train_global_batch_size"}) == 1);
}

TEST_CASE("a key without effect is reported where it was given", "[config]") {
  const ConfigResult result = rule_config();
  const ConfigFacts facts{result};
  const Broken idle{.reason = "has no effect", .idle = true};
  CHECK(judge(broken_rule({"policy.optimizer.lr"}, idle), facts).empty());
  CHECK(judge(broken_rule({"policy.train_global_batch_size"}, idle), facts).size() == 1);
  // A warning if the file turns off what the key needs.
  CHECK(judge(broken_rule({"policy.train_global_batch_size", "pretrain.max_num_steps"}, idle), facts)[0]
            .severity == Severity::warning);
}

TEST_CASE("all ways in which rules are broken are reported, in the order of the table", "[config]") {
  const ConfigResult result = rule_config();
  auto rules = broken_rule({"policy.train_global_batch_size"}, {.reason = "first"});
  rules.push_back({{}, [](const ConfigFacts&) -> Verdict {
                     return {{.reason = "second", .place = "environment: A=1"},
                             {.reason = "third", .place = "environment: B=1"}};
                   }});
  const Diagnostics found = judge(rules, ConfigFacts{result});
  REQUIRE(found.size() == 3);
  CHECK(found[0].message == "first");
  CHECK((found[1].message == "second" && found[1].file == "environment: A=1"));
  CHECK((found[2].message == "third" && found[2].key.empty()));
}

TEST_CASE("a level is judged if those before it have no problems", "[config]") {
  const ConfigResult result = rule_config();
  const std::vector<Rule<ConfigResult>>
      holds = {{{}, [](const ConfigResult&) { return Verdict{}; }}},
      first = {{{"device"}, [](const ConfigResult&) -> Verdict { return {{"first"}}; }}},
      second = {{{"device"}, [](const ConfigResult&) -> Verdict { return {{"second"}}; }}};
  const auto found = [&](std::initializer_list<std::span<const Rule<ConfigResult>>> levels) {
    std::string out;
    for (const Diagnostic& d : judge_levels(levels, result)) out += d.message + ";";
    return out;
  };
  CHECK(found({holds, first, second}) == "first;");
  CHECK(found({holds, second, first}) == "second;");
  CHECK(found({holds, holds}).empty());
}

TEST_CASE("texts of rules are filled in with values of keys and their places", "[config]") {
  const ConfigResult result = rule_config({"policy.precision=bfloat16"});
  const auto filled = [&](std::string_view text) { return filled_in(result, text); };
  CHECK(filled("no token") == "no token");
  CHECK(filled("<policy.train_global_batch_size> sequences") == "8 sequences");
  CHECK(filled("at <@policy.train_global_batch_size>, <@policy.cuda_graph>") == "at t.yaml:1:63, default");
  CHECK(filled("<:policy.precision> and <:policy.cuda_graph>.") ==
        "policy.precision: bfloat16 and policy.cuda_graph: false.");
  CHECK(filled("<=policy.precision>") ==
        "policy.precision is bfloat16 (command line: policy.precision=bfloat16)");
}

TEST_CASE("the tables of rules name keys of the option table", "[config]") {
  using namespace config_detail;
  for (const auto& table : {training_rules(), parallel_rules(), memory_rules(), precision_rules()})
    for (const ConfigRule& rule : table)
      for (const std::string& key : rule.keys) {
        INFO(key);
        CHECK(Schema::get().find(full_name(Config{}, key)));
      }
}
