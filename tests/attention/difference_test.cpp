// The measure by which results of attention are compared.

#include <vector>

#include "core/ops/attention_difference.h"
#include "tests/catch.h"

namespace nrl::ops {
namespace {

using Rows = std::vector<std::vector<double>>;

double difference(const Rows& got, const Rows& want) {
  const auto rows = static_cast<int64_t>(want.size()), width = static_cast<int64_t>(want[0].size());
  const auto of = [](const Rows& values) { return [&values](int64_t r, int64_t i) { return values[r][i]; }; };
  return largest_difference(rows, width, of(got), of(want), rms_of(rows, width, of(want)));
}

TEST_CASE("Differences count by the size of their row") {
  const Rows want = {{100, -100}, {1, -1}};
  CHECK(difference(want, want) == 0);
  CHECK(difference({{101, -100}, {1, -1}}, want) < 0.01);
  CHECK(difference({{100, -100}, {1.5, -1}}, want) > 0.1);
  CHECK(difference({{100, -100}, {-1, 1}}, want) > attention_difference_limit);
  CHECK(difference({{-100, 100}, {1, -1}}, want) > attention_difference_limit);
  CHECK(difference({{1, -1}, {100, -100}}, want) > attention_difference_limit);
}

TEST_CASE("A row that cancels to nothing is judged by the tensor's size") {
  const Rows want = {{1, -1}, {1e-9, 0}};
  CHECK(difference({{1, -1}, {0, 1e-9}}, want) < attention_difference_limit);
  CHECK(difference({{1, -1}, {1e-2, 0}}, want) > attention_difference_limit);
}

TEST_CASE("A value that is not finite differs from every other") {
  const Rows want = {{1, 2}};
  CHECK(std::isinf(difference({{NAN, 2}}, want)));
  CHECK(std::isinf(difference({{1, INFINITY}}, want)));
  CHECK(std::isinf(difference(want, {{NAN, 2}})));
}

}  // namespace
}  // namespace nrl::ops
