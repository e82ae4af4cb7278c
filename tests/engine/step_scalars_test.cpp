// Requests that travel with the scalars of a step.

#include "apps/engine/step_scalars.h"

#include <vector>

#include "tests/catch.h"

using namespace nrl;

TEST_CASE("requests of ranks add up in one scalar", "[engine]") {
  using S = ops::StepScalar;
  std::vector<double> memory(S::count);
  const Tensor scalars = make_tensor(memory.data(), DType::f64, {S::count});
  ops::Exec exec;
  engine::StepScalars steps(scalars, nullptr, {}, exec);
  const auto sent = [&](bool stop, bool gather, bool profile) {
    steps.begin(0.1, stop, gather, profile);
    const double value = memory[S::stop];
    (void)steps.collect();
    return value;
  };
  // Sums over 4,096 ranks.
  for (const int stops : {0, 1, 4000})
    for (const int gathers : {0, 1})
      for (const int profiles : {0, 1, 96}) {
        CAPTURE(stops, gathers, profiles);
        const double sum = stops * sent(true, false, false) + gathers * sent(false, true, false) +
                           profiles * sent(false, false, true);
        steps.begin(0.1, false, false, false);
        memory[S::stop] = sum;
        const engine::StepResult result = steps.collect();
        CHECK(result.stop == (stops > 0));
        CHECK(result.gather == (gathers > 0));
        CHECK(result.profile == (profiles > 0));
      }
  CHECK(sent(true, true, true) ==
        sent(true, false, false) + sent(false, true, false) + sent(false, false, true));
}
