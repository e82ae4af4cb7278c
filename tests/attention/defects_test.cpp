// The known defects of cuDNN, by version. No library is asked.

#include "core/ops/attention/cudnn/defects.h"

#include "tests/attention/problem.h"
#include "tests/catch.h"

namespace nrl::ops::attention {
namespace {

constexpr int oldest = 90800, hopper = 9, blackwell = 10;
constexpr Direction directions[] = {Direction::forward, Direction::backward};

Problem make(Direction direction, int64_t length, bool causal, bool equal = true) {
  return training_problem(direction, 2 * length, 2, {length, equal}, 4, 2, 64, causal);
}

TEST_CASE("What trains without context parallelism is refused by no version but of documents before 9.18") {
  for (const Direction direction : directions)
    for (const int64_t length : {2, 64, 100, 192, 1000, 4096})
      for (const bool equal : {true, false})
        for (const int version : {oldest, 91300, 91400, 91500, 91900, 92600, 93000})
          for (const int major : {8, hopper, blackwell})
            if (equal || version >= 91800)
              CHECK(defect_reason(make(direction, length, true, equal), {version, major}).empty());
}

TEST_CASE("Ragged gradients on Hopper are refused before cuDNN 9.18") {
  const Problem ragged = make(Direction::backward, 4096, true, false);
  const auto refused = [](const Problem& p, const CudnnVersion& v) { return !defect_reason(p, v).empty(); };
  for (const int version : {oldest, 91400, 91799}) CHECK(refused(ragged, {version, hopper}));
  for (const int version : {91800, 91900}) CHECK_FALSE(refused(ragged, {version, hopper}));
  CHECK_FALSE(refused(ragged, {91400, blackwell}));
  CHECK_FALSE(refused(make(Direction::backward, 4096, true, true), {91400, hopper}));
  CHECK_FALSE(refused(make(Direction::forward, 4096, true, false), {91400, hopper}));
}

TEST_CASE("Gradients without a mask are refused on Hopper for 64 keys over a multiple of 128") {
  for (const int version : {oldest, 91900, 93000})
    for (int64_t keys = 2; keys < 700; ++keys) {
      const bool refused = keys % 128 == 64;
      CAPTURE(version, keys);
      CHECK(defect_reason(make(Direction::backward, keys, false), {version, hopper}).empty() == !refused);
      CHECK(defect_reason(make(Direction::backward, keys, false), {version, blackwell}).empty());
      CHECK(defect_reason(make(Direction::forward, keys, false), {version, hopper}).empty());
      if (version >= 91800)
        CHECK(defect_reason(make(Direction::backward, keys, false, false), {version, hopper}).empty());
    }
  CHECK(defect_reason(make(Direction::backward, 192, false), {91900, hopper}).starts_with("cuDNN 9.19.0 "));
}

TEST_CASE("Gradients of other ranks' keys are refused on Hopper where these are 64 over a multiple of 128") {
  const CudnnVersion v{91900, hopper};
  for (const int64_t chunk : {32, 64, 96, 128, 192, 256, 1024}) {
    CAPTURE(chunk);
    const auto allowed = [&](const Problem& p) { return defect_reason(p, v).empty(); };
    CHECK(allowed(ring_problem(Direction::backward, 2, chunk, true, 4, 2, 64)) == (chunk % 128 != 64));
    CHECK(allowed(ring_problem(Direction::backward, 2, chunk, false, 4, 2, 64)) == (2 * chunk % 128 != 64));
    CHECK(allowed(gather_problem(Direction::backward, chunk, 2 * chunk, 4, 2, 64)) ==
          (3 * chunk % 128 != 64));
    CHECK(allowed(ring_problem(Direction::forward, 2, chunk, true, 4, 2, 64)));
    CHECK(allowed(gather_problem(Direction::forward, chunk, 2 * chunk, 4, 2, 64)));
  }
}

TEST_CASE("A dry run without cuDNN knows what 9.19 must not run") {
  CHECK_FALSE(assumed_defect_reason(make(Direction::backward, 192, false), hopper).empty());
  CHECK(assumed_defect_reason(make(Direction::backward, 192, false), blackwell).empty());
  CHECK(assumed_defect_reason(make(Direction::backward, 256, false), hopper).empty());
}

TEST_CASE("More than 1,024 keys without a mask are not captured with cuDNN 9.13 and 9.14") {
  for (const Direction direction : directions)
    for (const int version : {91200, 91300, 91301, 91400, 91401, 91501})
      for (const int64_t keys : {1024, 1152}) {
        const bool captured = version < 91300 || version >= 91500 || keys <= 1024;
        CAPTURE(version, keys);
        CHECK(uncapturable_reason(make(direction, keys, false), {version, hopper}).empty() == captured);
        CHECK(uncapturable_reason(make(direction, keys, true), {version, hopper}).empty());
      }
}

TEST_CASE("Gradients of lengths that are no multiple of 128 are not captured before cuDNN 9.15.1") {
  for (const bool causal : {true, false}) {
    CHECK_FALSE(uncapturable_reason(make(Direction::backward, 1000, causal), {91500, hopper}).empty());
    CHECK(uncapturable_reason(make(Direction::backward, 1000, causal), {91501, hopper}).empty());
    CHECK(uncapturable_reason(make(Direction::backward, 896, causal), {91500, hopper}).empty());
    CHECK(uncapturable_reason(make(Direction::forward, 1000, causal), {91500, hopper}).empty());
    CHECK(uncapturable_reason(make(Direction::backward, 1000, causal, false), {91200, hopper}).empty());
  }
}

TEST_CASE("Nothing plans the gradients of one query of one head") {
  Problem p = training_problem(Direction::backward, 1, 1, {1, true}, 1, 1, 64);
  CHECK_FALSE(unsupported_reason(p).empty());  // of any version
  CHECK_FALSE(defect_reason(p, {92600, hopper}).empty());
  CHECK(defect_reason(p, {92501, hopper}).empty());
  CHECK(defect_reason(p, {92700, hopper}).empty());
  p.heads = p.kv_heads = 2;
  CHECK(defect_reason(p, {92600, hopper}).empty());
}

}  // namespace
}  // namespace nrl::ops::attention
