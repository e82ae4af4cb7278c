// Answers of calculations. The pairs are our own; math-verify 0.9 judges them alike.
#include <string>
#include <utility>
#include <vector>

#include "apps/reward/verifier.h"
#include "tests/catch.h"

using namespace nrl::reward;

TEST_CASE("math answers: equal ones", "[reward]") {
  const std::vector<std::pair<std::string, std::string>> equal = {
      {"42", "42"},
      {" 42. ", "42"},
      {"42.0", "42"},
      {"042", "42"},
      {"-7", "-7.00"},
      {"\xe2\x88\x92"
       "7",
       "-7"},
      {"1,234", "1234"},
      {"1,234,567.5", "1234567.5"},
      {"\\frac{1}{2}", "0.5"},
      {"\\dfrac{1}{2}", "\\frac12"},
      {"\\tfrac{3}{4}", "6/8"},
      {"-\\frac{1}{2}", "-1/2"},
      {"\\frac{-1}{2}", "-0.5"},
      {"\\frac{1}{3}", "0.33333333"},
      {"50\\%", "50"},
      {"50%", "50"},
      {"$18", "18"},
      {"\\$18", "18"},
      {"18\\text{ dollars}", "18"},
      {"90^\\circ", "90"},
      {"90^{\\circ}", "90"},
      {"x = 5", "5"},
      {"x=5", "5"},
      {"(1, 2)", "(1,2)"},
      {"\\left(1,\\frac{1}{2}\\right)", "(1, 0.5)"},
      {"\\{1, 2, 3\\}", "\\{3,2,1\\}"},
      {"[0, 1)", "[0,1)"},
      {"(-\\infty, 3]", "(-\\infty,3]"},
      {"\\text{(B)}", "(b)"},
      {"\\mathrm{north}", "North"},
      {"x^2+1", "x^2 + 1"},
      {"2\\sqrt{3}", "2\\sqrt{3}"},
      {"3\\cdot 4", "3\\times4"},
  };
  for (const auto& [a, b] : equal) {
    CAPTURE(a, b);
    CHECK(same_answer(a, b));
    CHECK(same_answer(b, a));
  }
}

TEST_CASE("math answers: different ones", "[reward]") {
  const std::vector<std::pair<std::string, std::string>> different = {{"42", "43"},
                                                                      {"", ""},
                                                                      {"", "42"},
                                                                      {"0.5", "0.51"},
                                                                      {"1/2", "2/1"},
                                                                      {"-1/2", "1/2"},
                                                                      {"(1,2)", "(2,1)"},
                                                                      {"(1,2)", "[1,2]"},
                                                                      {"(1,2)", "(1,2,3)"},
                                                                      {"\\{1,1,2\\}", "\\{1,2,2\\}"},
                                                                      {"1,23", "123"},
                                                                      {"12,34", "1234"},
                                                                      {"1/0", "1"},
                                                                      {"x", "y"},
                                                                      {"\\frac{1}{2", "0.5"},
                                                                      {"1e400", "1e401"},
                                                                      {"0.333", "\\frac{1}{3}"}};
  for (const auto& [a, b] : different) {
    CAPTURE(a, b);
    CHECK_FALSE(same_answer(a, b));
    CHECK_FALSE(same_answer(b, a));
  }
}

TEST_CASE("math answers: hostile ones end", "[reward]") {
  const std::string braces(4000, '{'), fractions = [] {
    std::string s;
    for (int i = 0; i < 500; ++i) s += "\\frac{";
    return s;
  }();
  CHECK_FALSE(same_answer(braces, "1"));
  CHECK_FALSE(same_answer(fractions, "1"));
  CHECK_FALSE(same_answer(std::string(1 << 20, '9'), "1"));
  CHECK_FALSE(same_answer(std::string(4000, '('), std::string(3999, '(')));
}

TEST_CASE("math answers: the last box and the last number", "[reward]") {
  CHECK(last_boxed("so \\boxed{1} or \\boxed{\\frac{1}{2}}.") == "\\frac{1}{2}");
  CHECK(last_boxed("\\boxed{a{b}c} then \\boxed{open") == "a{b}c");
  CHECK_FALSE(last_boxed("none").has_value());
  CHECK(last_number("it is 3, then 1,234.50 apples") == "1234.50");
  CHECK(last_number("from 5-3") == "3");
  CHECK(last_number("is -3.") == "-3");
  CHECK(last_number("(1,2)") == "2");
  CHECK_FALSE(last_number("none").has_value());
}
