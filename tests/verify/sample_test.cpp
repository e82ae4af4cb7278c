// Samples of layouts: every pair of values that is allowed first, then triples, always the same.
#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "apps/verify/layouts.h"
#include "tests/catch.h"

using namespace nrl::verify;

namespace {

using Choice = std::vector<Layouts::Value>;

Choice choice(const std::string& key, int values) {
  Choice out;
  for (int v = 0; v < values; ++v) {
    const std::string value = key + "=" + std::to_string(v);
    out.push_back({value, {value}});
  }
  return out;
}

bool has(const Layouts& all, size_t i, const std::string& value) {
  const auto overrides = all.overrides(i);
  return std::find(overrides.begin(), overrides.end(), value) != overrides.end();
}

// Pairs of values, each in both orders.
size_t pairs(const Layouts& all, const std::vector<size_t>& of) {
  std::set<std::pair<int, int>> out;
  for (const size_t i : of)
    for (const int a : all.values(i))
      for (const int b : all.values(i))
        if (a != b) out.emplace(a, b);
  return out.size();
}

}  // namespace

TEST_CASE("layouts are all combinations, and values that take turns meet all others") {
  Layouts all;
  all.add({choice("a", 2), choice("b", 3)}, {choice("t", 5)});
  all.add({choice("a", 2), choice("c", 4)}, {choice("t", 5)});
  REQUIRE(all.size() == 2 * 3 + 2 * 4);
  std::set<std::string> names;
  for (size_t i = 0; i < all.size(); ++i) {
    CHECK(all.overrides(i).size() == 3);
    names.insert(all.name(i).substr(0, 8));
  }
  CHECK(names.size() == all.size());
  CHECK(all.name(0) == "a=0  b=0  t=0");
  CHECK(all.name(13) == "a=1  c=3  t=3");
  // The same value has the same number in both grids.
  CHECK(all.values(0)[0] == all.values(6)[0]);
}

TEST_CASE("a sample has every pair of values before it has anything else") {
  Layouts all;
  all.add({choice("a", 7), choice("b", 6), choice("c", 5), choice("d", 4)}, {});
  const auto any = [](size_t) { return true; };
  const Sample sample = take_sample(all, 100, any);
  REQUIRE(sample.layouts.size() == 100);
  CHECK(std::is_sorted(sample.layouts.begin(), sample.layouts.end()));
  CHECK(sample.strength == 2);
  CHECK(pairs(all, sample.layouts) == 2 * (7 * 6 + 7 * 5 + 7 * 4 + 6 * 5 + 6 * 4 + 5 * 4));
  CHECK(take_sample(all, 100, any).layouts == sample.layouts);

  const Sample few = take_sample(all, 10, any);
  CHECK(few.layouts.size() == 10);
  CHECK(few.strength == 0);
  CHECK(take_sample(all, 700, any).strength == 3);
  CHECK(take_sample(all, 2000, any).layouts.size() == all.size());
}

TEST_CASE("a sample has valid layouts only and gives up pairs that are refused") {
  Layouts all;
  all.add({choice("a", 10), choice("b", 10), choice("c", 10), choice("d", 10)}, {});
  size_t tries = 0;
  const auto valid = [&](size_t i) {
    ++tries;
    return !(has(all, i, "a=3") && has(all, i, "b=4")) && !has(all, i, "c=9");
  };
  const Sample sample = take_sample(all, 600, valid);
  REQUIRE(sample.layouts.size() == 600);
  for (const size_t i : sample.layouts) CHECK(valid(i));
  CHECK(sample.strength == 2);
  // All but a, b and d each with c=9, and a=3 with b=4.
  CHECK(pairs(all, sample.layouts) == 2 * (6 * 100 - 3 * 10 - 1));
  tries = 0;
  CHECK(take_sample(all, 20'000, valid).layouts.size() == (100 - 1) * 9 * 10);
  CHECK(tries == all.size());
}
