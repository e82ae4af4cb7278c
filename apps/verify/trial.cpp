#include "apps/verify/trial.h"

#include "apps/verify/trial_runs.h"

namespace nrl::verify {

void compare_steps(TrialRuns& runs, int64_t steps) {
  Comparison& comparison = runs.comparison();
  Learner& layout = runs.layout();
  Learner* const reference = runs.reference();
  layout.open(1, steps);
  if (reference) reference->open(1, steps);
  for (int64_t s = 1; s <= steps && comparison.ok(); ++s) {
    const When when{.step = s};
    engine::StepInput input = layout.next_step();
    input.eager = true;
    input.gradients_reduced = [&] { comparison.gradients(when, runs.compare_held(held_gradients)); };
    Outcome expected;
    if (reference) {
      engine::StepInput alone = reference->next_step();
      alone.eager = true;
      // The configured step runs inside of the reference's, when both have gradients and neither has updated
      // its weights.
      alone.gradients_reduced = [&] { layout.engine().step(input, layout.objective()); };
      reference->engine().step(alone, reference->objective());
      expected = reference->collect();
    } else {
      layout.engine().step(input, layout.objective());
    }
    comparison.step(when, layout.collect(), expected, false);
    comparison.weights(when, runs.compare_held(held_weights));
  }
}

TrialResult run_trial(comm::World& world, const ConfigResult& config, const train::TrainData& data,
                      int64_t steps) {
  TrialRuns runs(world, config, data, steps - 1);
  compare_steps(runs, steps);
  return runs.result();
}

}  // namespace nrl::verify
