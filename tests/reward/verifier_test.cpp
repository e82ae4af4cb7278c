// Verifiers of completions.
#include "apps/reward/verifier.h"

#include <string>

#include "core/base/error.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::reward;

namespace {

double judged(const std::string& spec, const std::string& record, const std::string& completion,
              int64_t tokens = 1) {
  const auto verifier = make_verifier(parse_specs({spec}).front());
  REQUIRE(verifier);
  const JsonValue parsed = parse_json(record, "record");
  verifier->check(parsed, "record");
  const auto reward = verifier->judge({.record = &parsed,
                                       .where = "f:1",
                                       .prompt = "",
                                       .completion = completion,
                                       .tokens = tokens,
                                       .ended = true});
  REQUIRE(reward);
  return *reward;
}

const std::string seven = R"({"answer": "seven"})";

}  // namespace

TEST_CASE("verifiers: exact and contains", "[reward]") {
  CHECK(judged("exact", seven, " seven\n") == 1);
  CHECK(judged("exact", seven, "Seven") == 0);
  CHECK(judged(R"({"type": "exact", "ignore_case": true})", seven, "SEVEN") == 1);
  CHECK(judged("exact", R"({"answer": 7})", "7") == 1);
  CHECK(judged("contains", seven, "it is seven!") == 1);
  CHECK(judged("contains", seven, "it is six") == 0);
  CHECK(judged(R"({"type": "exact", "answer_key": "gold"})", R"({"gold": "x"})", "x") == 1);
}

TEST_CASE("verifiers: the part that is judged", "[reward]") {
  const auto with = [](const std::string& extract) {
    return R"({"type": "exact", "extract": ")" + extract + "\"}";
  };
  CHECK(judged(with("last_line"), seven, "well,\n seven \n") == 1);
  CHECK(judged(with("after ####"), seven, "a #### six\n#### seven\n") == 1);
  CHECK(judged(with("after ####"), seven, "seven") == 0);
  CHECK(judged(with("tag answer"), seven, "<answer>six</answer> <answer> seven </answer>") == 1);
  CHECK(judged(with("tag answer"), seven, "<answer>seven") == 0);
  CHECK(judged(with("boxed"), seven, "\\boxed{seven}") == 1);
  CHECK(judged(with("regex [a-z]+"), seven, "SIX seven 8") == 1);
  CHECK(judged(R"({"type": "exact", "extract": "last_number"})", R"({"answer": "7"})", "5 or 7?") == 1);
  for (const char* wrong : {"last_lines", "after", "boxed x", "regex ("})
    CHECK_THROWS_AS(make_verifier(parse_specs({with(wrong)}).front()), Error);
}

TEST_CASE("verifiers: numbers, patterns and elements", "[reward]") {
  CHECK(judged("number", R"({"answer": "1,000"})", "about 1000.0005 of them") == 1);
  CHECK(judged("number", R"({"answer": 1000})", "about 1001 of them") == 0);
  CHECK(judged(R"({"type": "number", "tolerance": 0.01})", R"({"answer": 1000})", "1001") == 1);
  CHECK(judged("number", R"({"answer": 1000})", "none") == 0);
  CHECK(judged(R"({"type": "regex", "pattern": "^[0-9]{4}$"})", "{}", "1234") == 1);
  CHECK(judged(R"({"type": "regex", "pattern": "^[0-9]{4}$"})", "{}", "12345") == 0);
  CHECK(judged(R"({"type": "regex", "pattern": "(a+)+$"})", "{}", std::string(5000, 'a') + "b") == 0);
  CHECK(judged("math", R"({"answer": "1/2"})", "The answer is \\boxed{\\frac{1}{2}}") == 1);
  CHECK(judged("math", R"({"answer": "a \\boxed{3}"})", "it is 3") == 1);
  CHECK(judged("math", R"({"answer": "3"})", "nothing") == 0);
  CHECK(judged("multiset", R"({"answer": "1237"})", "3217") == 1);
  CHECK(judged("multiset", R"({"answer": "1237"})", "3211") == 0.75);
  CHECK(judged("multiset", R"({"answer": "a, b, c"})", "c a") == 2.0 / 3);
}

TEST_CASE("verifiers: format, length and JSON", "[reward]") {
  const std::string format = R"({"type": "format", "tags": ["think", "answer"]})";
  CHECK(judged(format, "{}", " <think>a</think>\n<answer>b</answer> ") == 1);
  CHECK(judged(format, "{}", "<think>a</think><answer>b</answer> more") == 0);
  CHECK(judged(format, "{}", "<answer>b</answer><think>a</think>") == 0);
  CHECK(judged(format, "{}", "<think>a<think></think><answer>b</answer>") == 0);
  CHECK(judged(format, "{}", "<think>a</think><answer>b") == 0);
  const std::string length = R"({"type": "length", "max_tokens": 100, "buffer_tokens": 20})";
  CHECK(judged(length, "{}", "", 80) == 0);
  CHECK(judged(length, "{}", "", 85) == -0.25);
  CHECK(judged(length, "{}", "", 100) == -1);
  CHECK(judged(length, "{}", "", 1000) == -1);
  const std::string json =
      R"({"type": "json", "schema": {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"},
      "b": {"type": "array", "items": {"enum": ["x", "y"]}}}}})";
  CHECK(judged("json", "{}", "[1, 2]") == 1);
  CHECK(judged("json", "{}", "[1, 2") == 0);
  CHECK(judged(json, "{}", R"({"a": 1, "b": ["x"]})") == 1);
  CHECK(judged(json, "{}", R"({"a": 1.5})") == 0);
  CHECK(judged(json, "{}", R"({"b": []})") == 0);
  CHECK(judged(json, "{}", R"({"a": 1, "b": ["z"]})") == 0);
  CHECK_THROWS_WITH(make_verifier(parse_specs({R"({"type": "json", "schema": {"oneOf": []}})"}).front()),
                    ContainsSubstring("reward[0].schema.oneOf is not supported"));
}

TEST_CASE("verifiers: a record without an answer is named", "[reward]") {
  const auto verifier = make_verifier(parse_specs({"exact"}).front());
  CHECK_THROWS_WITH(verifier->check(parse_json(R"({"question": "a"})", "r"), "prompts.jsonl:7"),
                    ContainsSubstring("prompts.jsonl:7: the record has no text or number under \"answer\""));
}
