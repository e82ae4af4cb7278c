// Documents of a sample kept apart, against lists written out here.

#include "apps/data/sample.h"

#include "tests/catch.h"

using namespace nrl::data;

namespace {

using Row = std::vector<int32_t>;

Sample made(const Row& ids, const DocumentRules& rules) {
  Sample sample;
  make_sample(Row(50, 9), {true, true, true, 9}, sample);  // what was in it before must not matter
  make_sample(ids, rules, sample);
  return sample;
}

constexpr int32_t end = 7;

}  // namespace

TEST_CASE("without rules a sample is one document, whatever tokens are in it", "[sample]") {
  const Sample s = made({1, end, 2, 3, end}, {.end_token = end});
  CHECK(s.ids == Row{1, end, 2, 3});
  CHECK(s.targets == Row{end, 2, 3, end});
  CHECK(s.positions == Row{0, 1, 2, 3});
  CHECK(s.segments == Row{0});
  CHECK(rows_without_loss(s).empty());
}

TEST_CASE("each rule for documents does its part", "[sample]") {
  // Documents "1 E", "2 3 E", "E" and "4 ...".
  const Row ids{1, end, 2, 3, end, end, 4, 5};
  const Row plain{0, 1, 2, 3, 4, 5, 6}, targets{end, 2, 3, end, end, 4, 5};
  const Sample positions = made(ids, {.reset_position_ids = true, .end_token = end});
  CHECK(positions.positions == Row{0, 1, 0, 1, 2, 0, 0});
  CHECK(positions.segments == Row{0});
  CHECK(positions.targets == targets);
  const Sample attention = made(ids, {.reset_attention_mask = true, .end_token = end});
  CHECK(attention.positions == plain);
  CHECK(attention.segments == Row{0, 2, 5, 6});
  CHECK(attention.targets == targets);
  // The end token is predicted; what follows it is not.
  const Sample loss = made(ids, {.eod_mask_loss = true, .end_token = end});
  CHECK(loss.positions == plain);
  CHECK(loss.segments == Row{0});
  CHECK(loss.targets == Row{end, -1, 3, end, -1, -1, 5});
  CHECK(rows_without_loss(loss) == Row{1, 4, 5});
}

TEST_CASE("an end token at either end of a sample makes no empty segment", "[sample]") {
  const DocumentRules all{true, true, true, end};
  const Sample first = made({end, 1, 2}, all);
  CHECK(first.segments == Row{0, 1});
  CHECK(first.positions == Row{0, 0});
  CHECK(first.targets == Row{-1, 2});
  const Sample last = made({1, end, 2}, all);  // the last input
  CHECK(last.segments == Row{0});
  CHECK(last.targets == Row{end, -1});
  const Sample target = made({1, 2, end}, all);  // a target only
  CHECK(target.segments == Row{0});
  CHECK(target.targets == Row{2, end});
}
