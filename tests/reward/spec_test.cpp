// Entries of the key `reward`.
#include "apps/reward/spec.h"

#include <string>
#include <vector>

#include "core/base/error.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::reward;

namespace {

std::string refusal(const std::string& text) {
  try {
    parse_specs({text});
  } catch (const Error& e) {
    CHECK(e.code() == Exit::config);
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("reward specs: names, weights and options", "[reward]") {
  const std::vector<Spec> specs = parse_specs(
      {"exact",
       R"({"type": "exact", "name": "again", "weight": -0.5, "answer_key": "gold", "ignore_case": true})",
       R"({"type": "format", "tags": ["think", "answer"]})"});
  REQUIRE(specs.size() == 3);
  CHECK(specs[0].name == "exact");
  CHECK(specs[0].weight == 1);
  CHECK(specs[1].name == "again");
  CHECK(specs[1].weight == -0.5);
  CHECK(specs[1].options.get_string("answer_key") == "gold");
  CHECK(specs[1].options.get_bool("ignore_case"));
  CHECK_FALSE(specs[1].options.contains("weight"));
  CHECK(specs[2].where == "reward[2]");
}

TEST_CASE("reward specs: everything wrong is named with its place", "[reward]") {
  struct Case {
    const char *text, *message;
  };
  const Case cases[] = {
      {R"({"type": "model", "model": "rm"})",
       "reward[0].type: model: a reward model beside the policy is not supported yet"},
      {"exakt", "reward[0].type: there is no type 'exakt'. Fix: exact, contains"},
      {"{}", "reward[0].type is missing"},
      {R"({"type": 3})", "reward[0].type is missing"},
      {R"({"type": "exact", "answerkey": "a"})", "there is no option of type exact, 'answerkey'"},
      {R"({"type": "exact", "answer_key": 3})", "reward[0].answer_key: expected a text, found an integer"},
      {R"({"type": "exact", "weight": "1"})", "reward[0].weight: expected a number"},
      {R"({"type": "exact", "name": "a b"})", "other characters than letters"},
      {R"({"type": "exact", "ignore_case": 1})", "reward[0].ignore_case: expected true or false"},
      {R"({"type": "command"})", "reward[0]: type command needs command"},
      {R"({"type": "command", "command": "x", "time_limit_s": 0})", "expected a number above 0"},
      {R"({"type": "command", "command": "x", "workers": 0})", "expected an integer from 1"},
      {R"({"type": "format", "tags": "think"})", "reward[0].tags: expected a list of texts"},
      {R"({"type": "json", "schema": []})", "reward[0].schema: expected a mapping"}};
  for (const Case& c : cases) {
    CAPTURE(c.text);
    CHECK_THAT(refusal(c.text), ContainsSubstring(c.message));
  }
  CHECK_THROWS_WITH(parse_specs({"exact", "exact"}),
                    ContainsSubstring("reward[1].name: 'exact' is the name of another entry"));
}
