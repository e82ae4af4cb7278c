#include "apps/train/loop/lr_schedule.h"

#include <cmath>

#include "core/config/load.h"
#include "tests/catch.h"
#include "tests/reference/schedule.h"

using namespace nrl;
using namespace nrl::train;

namespace {

LrSchedule schedule(LrDecayStyle decay) {
  return {.decay = decay,
          .lr = 2e-4,
          .min_lr = 2e-5,
          .warmup_steps = 100,
          .decay_steps = 1100,
          .wsd_decay_steps = 200};
}

}  // namespace

TEST_CASE("the warm-up is linear from 0 for every shape", "[train]") {
  for (LrDecayStyle decay : {LrDecayStyle::constant, LrDecayStyle::linear, LrDecayStyle::cosine,
                             LrDecayStyle::wsd, LrDecayStyle::inverse_square_root}) {
    const LrSchedule s = schedule(decay);
    REQUIRE(learning_rate(s, 1) == Approx(2e-6));
    REQUIRE(learning_rate(s, 50) == Approx(1e-4));
    REQUIRE(learning_rate(s, 100) == 2e-4);
  }
}

TEST_CASE("each shape has its closed form", "[train]") {
  REQUIRE(learning_rate(schedule(LrDecayStyle::constant), 1000000) == 2e-4);

  const LrSchedule linear = schedule(LrDecayStyle::linear);
  REQUIRE(learning_rate(linear, 600) == Approx(1.1e-4));
  REQUIRE(learning_rate(linear, 1100) == Approx(2e-5));
  REQUIRE(learning_rate(linear, 1101) == 2e-5);

  const LrSchedule cosine = schedule(LrDecayStyle::cosine);
  REQUIRE(learning_rate(cosine, 350) == Approx(2e-5 + 1.8e-4 * (1 + std::sqrt(0.5)) / 2));
  REQUIRE(learning_rate(cosine, 600) == Approx(1.1e-4));
  REQUIRE(learning_rate(cosine, 1100) == Approx(2e-5));
  REQUIRE(learning_rate(cosine, 5000) == 2e-5);

  const LrSchedule wsd = schedule(LrDecayStyle::wsd);
  REQUIRE(learning_rate(wsd, 500) == 2e-4);
  REQUIRE(learning_rate(wsd, 900) == 2e-4);
  REQUIRE(learning_rate(wsd, 1000) == Approx(1.1e-4));
  REQUIRE(learning_rate(wsd, 1100) == Approx(2e-5));
  REQUIRE(learning_rate(wsd, 1101) == 2e-5);

  LrSchedule root = schedule(LrDecayStyle::inverse_square_root);
  REQUIRE(learning_rate(root, 400) == Approx(1e-4));
  root.decay_steps = 1000000;
  REQUIRE(learning_rate(root, 900000) == 2e-5);  // 2e-4 / sqrt(9000) lies below the least rate
  root.warmup_steps = 0;
  root.min_lr = 0;
  REQUIRE(learning_rate(root, 1) == 2e-4);
  REQUIRE(learning_rate(root, 4) == Approx(1e-4));
}

TEST_CASE("steps and cycles follow their definitions", "[train]") {
  // PyTorch's StepLR(step_size=10, gamma=0.5), after a warm-up of 5, above min_lr.
  const LrSchedule steps = {
      .decay = LrDecayStyle::step, .lr = 8, .min_lr = 1.5, .warmup_steps = 5, .period = 10, .factor = 0.5};
  for (int64_t s = 1; s <= 5; ++s) CHECK(learning_rate(steps, s) == Approx(8.0 * static_cast<double>(s) / 5));
  for (int64_t s = 6; s <= 15; ++s) CHECK(learning_rate(steps, s) == 8);
  for (int64_t s = 16; s <= 25; ++s) CHECK(learning_rate(steps, s) == 4);
  for (int64_t s = 26; s <= 35; ++s) CHECK(learning_rate(steps, s) == 2);
  for (int64_t s = 36; s <= 1000; s += 7) CHECK(learning_rate(steps, s) == 1.5);
  // Triangles: PyTorch's CyclicLR(base_lr=1, max_lr=5, step_size_up=4) has the same peaks after a warm-up
  // of 4.
  const LrSchedule cycles = {
      .decay = LrDecayStyle::cyclical, .lr = 5, .min_lr = 1, .warmup_steps = 4, .period = 8};
  const double cycle[] = {4, 3, 2, 1, 2, 3, 4, 5};
  for (int64_t s = 5; s <= 100; ++s) CHECK(learning_rate(cycles, s) == Approx(cycle[(s - 5) % 8]));
  // An odd cycle misses the lowest rate by half a step.
  const LrSchedule odd = {.decay = LrDecayStyle::cyclical, .lr = 3, .min_lr = 0, .period = 3};
  CHECK(learning_rate(odd, 1) == Approx(1));
  CHECK(learning_rate(odd, 2) == Approx(1));
  CHECK(learning_rate(odd, 3) == Approx(3));
}

// To the last bit: the same formula in the same order of operations.
TEST_CASE("every step of every shape has the reference's rate", "[train]") {
  struct Length {
    int64_t warmup, end, wsd;
  };
  const std::pair<LrDecayStyle, const char*> shapes[] = {
      {LrDecayStyle::constant, "constant"},
      {LrDecayStyle::linear, "linear"},
      {LrDecayStyle::cosine, "cosine"},
      {LrDecayStyle::wsd, "WSD"},
      {LrDecayStyle::inverse_square_root, "inverse-square-root"}};
  const Length lengths[] = {{0, 1, 1},   {0, 50, 50}, {1, 50, 1},  {7, 50, 13},
                            {7, 20, 13}, {49, 50, 1}, {3, 100, 20}};
  for (const auto& [decay, style] : shapes)
    for (const auto& [warmup, end, wsd] : lengths)
      for (const double min_lr : {0.0, 1e-4, 3e-3}) {
        const LrSchedule s = {decay, 3e-3, min_lr, warmup, end, wsd};
        for (int64_t step = 1; step <= end + 5; ++step) {
          INFO(style << ", warm-up " << warmup << ", end " << end << ", step " << step);
          REQUIRE(learning_rate(s, step) ==
                  reference::learning_rate({style, 3e-3, min_lr, warmup, end, wsd}, step));
        }
      }
}

TEST_CASE("a decay without warm-up begins at the first step", "[train]") {
  const LrSchedule s = {.decay = LrDecayStyle::linear, .lr = 1.0, .decay_steps = 4};
  REQUIRE(learning_rate(s, 1) == 0.75);
  REQUIRE(learning_rate(s, 4) == 0);
}

TEST_CASE("a warm-up as long as the decay is allowed", "[train]") {
  LrSchedule s = {
      .decay = LrDecayStyle::cosine, .lr = 1.0, .min_lr = 0.5, .warmup_steps = 10, .decay_steps = 10};
  REQUIRE(learning_rate(s, 10) == 1.0);
  REQUIRE(learning_rate(s, 11) == 0.5);
}

TEST_CASE("every schedule of a sound configuration has room for its warm-up and its final decay", "[train]") {
  for (const bool ratio : {false, true})
    for (const int64_t warmup : {0, 1, 7, 50, 99})
      for (const int64_t decay : {1, 2, 50, 1000})
        for (const int64_t steps : {1, 2, 9, 100, 1001}) {
          PolicyConfig policy;
          policy.scheduler.lr_decay_style = LrDecayStyle::wsd;
          policy.scheduler.lr_wsd_decay_iters = decay;
          if (ratio)
            policy.scheduler.warmup_ratio = static_cast<double>(warmup) / 100;
          else
            policy.scheduler.lr_warmup_iters = warmup;
          CAPTURE(ratio, warmup, decay, steps);
          const LrSchedule s = make_lr_schedule(policy, steps, 4);  // it checks itself
          CHECK(s.decay_steps >= steps);
          // A run that is long enough is not made longer.
          const int64_t warm = ratio ? std::llround(static_cast<double>(warmup * steps) / 100) : warmup;
          if (warm + decay <= steps) CHECK(s.decay_steps == steps);
        }
}

TEST_CASE("rates scale with the batch", "[train]") {
  REQUIRE(scaled_lr(1e-4, LrScalingRule::none, 512, 32) == 1e-4);
  REQUIRE(scaled_lr(1e-4, LrScalingRule::linear, 512, 32) == Approx(1.6e-3));
  REQUIRE(scaled_lr(1e-4, LrScalingRule::sqrt, 512, 32) == Approx(4e-4));
}
