// Times of steps.

#include "core/base/step_times.h"

#include "tests/catch.h"

using namespace nrl;

TEST_CASE("the median of steps is known after three, and a step that hung does not raise it", "[base]") {
  StepTimes times;
  for (int i = 0; i < 2; ++i) times.add(2);
  CHECK(!times.known());
  CHECK(times.median() == 0);
  CHECK(times.limit(20, 60) == 60);
  times.add(2);
  CHECK(times.median() == 2);
  CHECK(times.limit(20, 10) == 40);
  CHECK(times.limit(20, 60) == 60);
  for (int i = 0; i < 5; ++i) times.add(1000);  // count as 6
  CHECK(times.median() == 6);
  for (size_t i = 0; i < StepTimes::history; ++i) times.add(1);
  CHECK(times.median() == 1);
}
