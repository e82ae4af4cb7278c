#include "apps/state/run_state.h"

namespace nrl::train {

TrainState state_of(engine::Engine& engine, Staging* staging) {
  engine.finish_gathers();
  TrainState state;
  state.spec = &engine.plan().spec;
  state.parameters = &engine.plan().parameters;
  state.whole = &engine.plan().whole();
  state.weights = engine.weight_slices();
  state.groups = engine.groups();
  const model::DelayedScales& scales = engine.plan().decoder->fp8().delayed();
  state.scales = scales.scale;
  state.amax = scales.amax;
  state.staging = staging;
  return state;
}

void with_state(engine::Engine& engine, const std::function<void(const TrainState&)>& work) {
  const std::unique_ptr<Staging> staging = engine.staging();
  work(state_of(engine, staging.get()));
  if (staging) staging->finish();
}

}  // namespace nrl::train
