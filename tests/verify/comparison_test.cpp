// The comparison of scalars: every rank has its own, and those of rank 0 are the reference.
#include "apps/verify/comparison.h"

#include <cmath>
#include <limits>
#include <optional>

#include "tests/catch.h"
#include "tests/comm/world_fixture.h"

using namespace nrl;
using namespace nrl::verify;

namespace {

constexpr Limits limits{.loss = 1e-6, .norm = 1e-5, .gradient = 1e-5, .weight = 1e-5};
constexpr Outcome good{.loss = 2, .norm = 3, .loss_scale = 1024, .skipped = false};

/// The failed check of a step, which must be the only one; null: none fails.
std::optional<Check> failure(const Outcome& got, const Outcome& want, bool skips = true) {
  Comparison comparison(test_world().comm(), limits);
  comparison.step({.step = 4, .phase = Phase::resumed}, got, want, skips);
  const std::vector<Check> checks = comparison.checks();
  CHECK(checks.size() == (skips ? 4 : 2));
  CHECK(comparison.ok() == checks.front().ok());
  if (checks.front().ok()) return std::nullopt;
  CHECK(checks.front().when.step == 4);
  CHECK(checks.front().when.phase == Phase::resumed);
  return checks.front();
}

/// `spoil` on the last rank.
template <class Spoil>
Outcome on_last(const Spoil& spoil) {
  Outcome out = good;
  comm::Communicator& world = test_world().comm();
  if (world.rank() == world.size() - 1) spoil(out);
  return out;
}

}  // namespace

TEST_CASE("each scalar of a step is compared on every rank") {
  // Only rank 0 has the reference.
  const Outcome want = test_world().comm().rank() == 0 ? good : Outcome{};
  CHECK_FALSE(failure(good, want));
  CHECK_FALSE(failure(on_last([](Outcome& o) { o.loss *= 1 + 9e-7; }), want));
  CHECK(failure(on_last([](Outcome& o) { o.loss *= 1 + 2e-6; }), want)->kind == Kind::loss);
  CHECK(failure(on_last([](Outcome& o) { o.norm *= 1 + 2e-5; }), want)->kind == Kind::norm);
  CHECK(failure(on_last([](Outcome& o) { o.skipped = true; }), want)->kind == Kind::skipped);
  CHECK(failure(on_last([](Outcome& o) { o.loss_scale = 512; }), want)->kind == Kind::loss_scale);
  CHECK(failure({.loss = std::nan(""), .norm = 3, .loss_scale = 1024}, want)->kind == Kind::loss);
  // The comparison after every step has no scales.
  CHECK_FALSE(failure(on_last([](Outcome& o) { o.loss_scale = 512; }), want, false));
}

TEST_CASE("a gradient norm that is not finite is right in a step that both runs skip") {
  constexpr double inf = std::numeric_limits<double>::infinity();
  Outcome want = good, got = good;
  want.norm = inf, got.norm = std::nan("");
  CHECK(failure(got, want)->kind == Kind::norm);
  want.skipped = true;
  CHECK(failure(got, want));
  got.skipped = true;
  CHECK_FALSE(failure(got, want));
  got.norm = 3;
  CHECK(failure(got, want)->kind == Kind::norm);
}

TEST_CASE("an evaluation has the limit of a loss, and the worst of all steps is kept") {
  Comparison comparison(test_world().comm(), limits);
  comparison.evaluation({.step = 1}, 2, 2);
  comparison.evaluation({.step = 2}, 2 * (1 + 5e-7), 2);
  comparison.evaluation({.step = 3}, 2 * (1 + 2e-7), 2);
  REQUIRE(comparison.ok());
  CHECK(comparison.checks().front().when.step == 2);
  comparison.evaluation({.step = 4, .phase = Phase::reference_resumed}, 2 * (1 + 2e-6), 2);
  CHECK_FALSE(comparison.ok());
  CHECK(comparison.checks().front().kind == Kind::evaluation);
  CHECK(comparison.checks().front().when.step == 4);
  CHECK(comparison.steps().size() == 4);
}
