#include "apps/train/run_io/lr_schedule.h"

#include <cmath>
#include <string>

#include "core/base/error.h"
#include "tests/catch.h"
#include "tests/reference/schedule.h"

using namespace nrl;

namespace {

LrSchedule schedule(LrDecay decay) {
  return {.decay = decay,
          .lr = 2e-4,
          .min_lr = 2e-5,
          .warmup_steps = 100,
          .decay_steps = 1100,
          .wsd_decay_steps = 200};
}

void require_refused(const LrSchedule& s, const std::string& part) {
  try {
    check(s);
    FAIL("accepted, but " << part << " is wrong");
  } catch (const Error& e) {
    REQUIRE(e.code() == Exit::config);
    REQUIRE(std::string(e.what()).find(part) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("the warm-up is linear from 0 for every shape", "[run_io]") {
  for (LrDecay decay :
       {LrDecay::constant, LrDecay::linear, LrDecay::cosine, LrDecay::wsd, LrDecay::inverse_square_root}) {
    const LrSchedule s = schedule(decay);
    check(s);
    REQUIRE(learning_rate(s, 1) == Approx(2e-6));
    REQUIRE(learning_rate(s, 50) == Approx(1e-4));
    REQUIRE(learning_rate(s, 100) == 2e-4);
  }
}

TEST_CASE("each shape has its closed form", "[run_io]") {
  REQUIRE(learning_rate(schedule(LrDecay::constant), 1000000) == 2e-4);

  const LrSchedule linear = schedule(LrDecay::linear);
  REQUIRE(learning_rate(linear, 600) == Approx(1.1e-4));
  REQUIRE(learning_rate(linear, 1100) == Approx(2e-5));
  REQUIRE(learning_rate(linear, 1101) == 2e-5);

  const LrSchedule cosine = schedule(LrDecay::cosine);
  REQUIRE(learning_rate(cosine, 350) == Approx(2e-5 + 1.8e-4 * (1 + std::sqrt(0.5)) / 2));
  REQUIRE(learning_rate(cosine, 600) == Approx(1.1e-4));
  REQUIRE(learning_rate(cosine, 1100) == Approx(2e-5));
  REQUIRE(learning_rate(cosine, 5000) == 2e-5);

  const LrSchedule wsd = schedule(LrDecay::wsd);
  REQUIRE(learning_rate(wsd, 500) == 2e-4);
  REQUIRE(learning_rate(wsd, 900) == 2e-4);
  REQUIRE(learning_rate(wsd, 1000) == Approx(1.1e-4));
  REQUIRE(learning_rate(wsd, 1100) == Approx(2e-5));
  REQUIRE(learning_rate(wsd, 1101) == 2e-5);

  LrSchedule root = schedule(LrDecay::inverse_square_root);
  REQUIRE(learning_rate(root, 400) == Approx(1e-4));
  root.decay_steps = 1000000;
  REQUIRE(learning_rate(root, 900000) == 2e-5);  // 2e-4 / sqrt(9000) lies below the least rate
  root.warmup_steps = 0;
  root.min_lr = 0;
  REQUIRE(learning_rate(root, 1) == 2e-4);
  REQUIRE(learning_rate(root, 4) == Approx(1e-4));
}

// To the last bit: the same formula in the same order of operations.
TEST_CASE("every step of every shape has the reference's rate", "[run_io]") {
  struct Length {
    int64_t warmup, end, wsd;
  };
  const std::pair<LrDecay, const char*> shapes[] = {{LrDecay::constant, "constant"},
                                                    {LrDecay::linear, "linear"},
                                                    {LrDecay::cosine, "cosine"},
                                                    {LrDecay::wsd, "WSD"},
                                                    {LrDecay::inverse_square_root, "inverse-square-root"}};
  const Length lengths[] = {{0, 1, 1},   {0, 50, 50}, {1, 50, 1},  {7, 50, 13},
                            {7, 20, 13}, {49, 50, 1}, {3, 100, 20}};
  for (const auto& [decay, style] : shapes)
    for (const auto& [warmup, end, wsd] : lengths)
      for (const double min_lr : {0.0, 1e-4, 3e-3}) {
        const LrSchedule s = {decay, 3e-3, min_lr, warmup, end, wsd};
        check(s);
        for (int64_t step = 1; step <= end + 5; ++step) {
          INFO(style << ", warm-up " << warmup << ", end " << end << ", step " << step);
          REQUIRE(learning_rate(s, step) ==
                  reference::learning_rate({style, 3e-3, min_lr, warmup, end, wsd}, step));
        }
      }
}

TEST_CASE("a decay without warm-up begins at the first step", "[run_io]") {
  const LrSchedule s = {.decay = LrDecay::linear, .lr = 1.0, .decay_steps = 4};
  check(s);
  REQUIRE(learning_rate(s, 1) == 0.75);
  REQUIRE(learning_rate(s, 4) == 0);
}

TEST_CASE("a warm-up as long as the decay is allowed", "[run_io]") {
  LrSchedule s = {.decay = LrDecay::cosine, .lr = 1.0, .min_lr = 0.5, .warmup_steps = 10, .decay_steps = 10};
  check(s);
  REQUIRE(learning_rate(s, 10) == 1.0);
  REQUIRE(learning_rate(s, 11) == 0.5);
}

TEST_CASE("impossible schedules are refused by name", "[run_io]") {
  LrSchedule s = schedule(LrDecay::linear);
  s.lr = -1;
  require_refused(s, "lr: -1");
  s = schedule(LrDecay::linear);
  s.lr = std::nan("");
  require_refused(s, "lr:");
  s = schedule(LrDecay::cosine);
  s.min_lr = 1;
  require_refused(s, "min_lr: 1 is greater than lr");
  s = schedule(LrDecay::cosine);
  s.warmup_steps = -1;
  require_refused(s, "lr_warmup_iters: -1");
  s = schedule(LrDecay::cosine);
  s.decay_steps = 99;
  require_refused(s, "before the warm-up does");
  s = schedule(LrDecay::cosine);
  s.warmup_steps = s.decay_steps = 0;
  require_refused(s, "lr_decay_iters: 0");
  s = schedule(LrDecay::wsd);
  s.wsd_decay_steps = 1001;
  require_refused(s, "at most 1000 steps fit");
  s.wsd_decay_steps = 0;
  require_refused(s, "lr_wsd_decay_iters: 0");
}

TEST_CASE("rates scale with the batch", "[run_io]") {
  REQUIRE(scaled_lr(1e-4, LrScaling::none, 512, 32) == 1e-4);
  REQUIRE(scaled_lr(1e-4, LrScaling::linear, 512, 32) == Approx(1.6e-3));
  REQUIRE(scaled_lr(1e-4, LrScaling::sqrt, 512, 32) == Approx(4e-4));
  REQUIRE_THROWS_AS(scaled_lr(1e-4, LrScaling::sqrt, 512, 0), Error);
}

TEST_CASE("names of schedules and rules", "[run_io]") {
  REQUIRE(lr_decay_from("WSD") == LrDecay::wsd);
  REQUIRE(lr_decay_from("inverse-square-root") == LrDecay::inverse_square_root);
  REQUIRE(lr_decay_from("cosine") == LrDecay::cosine);
  REQUIRE_THROWS_AS(lr_decay_from("cosin"), Error);
  REQUIRE(lr_scaling_from("sqrt") == LrScaling::sqrt);
  REQUIRE_THROWS_AS(lr_scaling_from("square"), Error);
}
