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
  const auto sent = [&](const engine::StepRequests& asks) {
    steps.begin(0.1, asks);
    const double value = memory[S::stop];
    (void)steps.collect();
    return value;
  };
  // Sums over 4,096 ranks.
  for (const int stops : {0, 1, 4000})
    for (const int gathers : {0, 1})
      for (const int saves : {0, 1})
        for (const int profiles : {0, 1, 96}) {
          CAPTURE(stops, gathers, saves, profiles);
          const double sum = stops * sent({.stop = true}) + gathers * sent({.gather = true}) +
                             saves * sent({.save = true}) + profiles * sent({.profile = true});
          steps.begin(0.1, {});
          memory[S::stop] = sum;
          const engine::StepRequests asked = steps.collect().asked;
          CHECK(asked.stop == (stops > 0));
          CHECK(asked.gather == (gathers > 0));
          CHECK(asked.save == (saves > 0));
          CHECK(asked.profile == (profiles > 0));
        }
  CHECK(sent({.stop = true, .gather = true, .save = true, .profile = true}) ==
        sent({.stop = true}) + sent({.gather = true}) + sent({.save = true}) + sent({.profile = true}));
}
