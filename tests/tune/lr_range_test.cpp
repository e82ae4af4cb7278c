// The choice of a learning rate from the losses of a range test.

#include "apps/tune/lr_range.h"

#include <cmath>
#include <vector>

#include "tests/catch.h"

using namespace nrl::tune;

namespace {

/// Losses of a run whose loss falls by `speed` per log(lr) between two rates and rises from `turn` on.
std::vector<LrPoint> curve(double low, double turn, int64_t steps, double noise = 0) {
  std::vector<LrPoint> out;
  double loss = 10;
  for (int64_t s = 1; s <= steps; ++s) {
    const double lr = range_lr(1e-6, 1, s, steps);
    if (lr > turn)
      loss *= 1.5;
    else if (lr > low)
      loss -= 0.1;
    out.push_back({lr, loss + noise * std::sin(static_cast<double>(7 * s))});
  }
  return out;
}

}  // namespace

TEST_CASE("the rates of a range test have equal ratios", "[tune]") {
  CHECK(range_lr(1e-6, 1, 1, 7) == 1e-6);
  CHECK(range_lr(1e-6, 1, 7, 7) == Approx(1));
  for (int64_t s = 2; s <= 7; ++s) CHECK(range_lr(1e-6, 1, s, 7) / range_lr(1e-6, 1, s - 1, 7) == Approx(10));
}

TEST_CASE("the smoothed loss of a constant is the constant", "[tune]") {
  SmoothedLoss loss;
  for (int i = 0; i < 5; ++i) CHECK(loss.add(3) == Approx(3));
  const double next = loss.add(4);
  CHECK(next > 3.1);
  CHECK(next < 3.5);
}

TEST_CASE("a loss diverges above four times the best or where it is not finite", "[tune]") {
  CHECK(!diverged(8, 2));
  CHECK(diverged(8.01, 2));
  CHECK(diverged(NAN, 2));
  CHECK(diverged(INFINITY, 2));
  CHECK(!diverged(1.9, -2));  // losses below zero
  CHECK(diverged(4.1, -2));
}

TEST_CASE("the choice lies between the fall and the turn of the loss", "[tune]") {
  for (const double noise : {0.0, 0.02}) {
    const std::vector<LrPoint> points = curve(1e-4, 1e-1, 120, noise);
    const auto found = suggest(points);
    REQUIRE(found);
    CHECK(found->turned);
    CHECK(points[found->steepest].lr > 1e-4);
    CHECK(points[found->steepest].lr < 1e-1);
    CHECK(points[found->turn].lr > 5e-2);
    CHECK(points[found->turn].lr < 2e-1);
    CHECK(found->largest == Approx(points[found->turn].lr / 10));
  }
}

TEST_CASE("a range that ends before the turn says so", "[tune]") {
  const std::vector<LrPoint> points = curve(1e-4, 10, 60);
  const auto found = suggest(points);
  REQUIRE(found);
  CHECK(!found->turned);
  CHECK(found->turn + 1 == points.size());
}

TEST_CASE("no choice without a falling loss", "[tune]") {
  std::vector<LrPoint> points = curve(1e-4, 1e-1, 9);
  CHECK(!suggest(points));  // too few
  points.clear();
  for (int i = 1; i <= 30; ++i) points.push_back({1e-3 * i, 5.0 + i});
  CHECK(!suggest(points));
}
