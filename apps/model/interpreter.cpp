#include "apps/model/interpreter.h"

#include "core/trace/trace.h"

namespace nrl::model {

using pipeline::Action;
using pipeline::ActionKind;

std::vector<LayerVisit> layer_visits(const pipeline::Schedule& schedule, const Stage& stage) {
  std::vector<LayerVisit> visits;
  for (const Action& a : schedule.actions) {
    const bool backward = a.kind == ActionKind::backward || a.kind == ActionKind::backward_data ||
                          a.kind == ActionKind::backward_weight;
    if (!backward && a.kind != ActionKind::forward) continue;
    const Chunk& layers = stage.layers(a.chunk);
    for (size_t i = 0; i < layers.size(); ++i)
      visits.push_back({.layer = layers[backward ? layers.size() - 1 - i : i].get(),
                        .backward = backward,
                        .whole = !backward || a.kind == ActionKind::backward,
                        .last = a.last});
  }
  return visits;
}

void execute(const pipeline::Schedule& schedule, Stage& stage, int program,
             std::span<const MicroBatch> batches, const StepHooks& hooks) {
  const auto stash_of = [&](int chunk, const Action& a) {
    return a.microbatch % schedule.stashes[static_cast<size_t>(chunk)];
  };
  const auto call = [&](const std::function<void()>& hook) {
    if (hook && !stage.recording()) hook();
  };
  stage.begin(program);
  for (const Action& a : schedule.actions) {
    const auto batch = [&]() -> const MicroBatch& { return batches[static_cast<size_t>(a.microbatch)]; };
    // Passes of a chunk are in the order of microbatches.
    const Stage::Order order{.first = a.microbatch == 0, .last = a.last};
    const auto backward = [&](bool dgrad, bool wgrad) {
      const trace::Range range("backward_pass");
      stage.backward(a.chunk, a.stash, batch(), {.dgrad = dgrad, .wgrad = wgrad}, order);
    };
    switch (a.kind) {
      case ActionKind::forward: {
        const trace::Range range("forward_pass");
        stage.forward(a.chunk, a.stash, batch(), order);
        if (a.chunk + 1 == stage.chunks() && hooks.log_probs_ready && !stage.recording())
          hooks.log_probs_ready(a.microbatch);
        break;
      }
      case ActionKind::backward:
        backward(true, true);
        break;
      case ActionKind::backward_data:
        backward(true, false);
        break;
      case ActionKind::backward_weight:
        backward(false, true);
        break;
      case ActionKind::receive_forward:
        stage.receive_forward(a.chunk, a.stash, stash_of(a.chunk - 1, a));
        break;
      case ActionKind::receive_backward:
        stage.receive_backward(a.chunk, a.stash, stash_of(a.chunk + 1, a));
        break;
      case ActionKind::finish_reduce:
        call(hooks.finish_reduce);
        break;
      case ActionKind::step: {
        const trace::Range range("optimizer_step");
        call(hooks.update);
        break;
      }
      case ActionKind::send_forward:
      case ActionKind::send_backward:
      case ActionKind::finish_send:
        NRL_CHECK(false, "{} in a schedule with a single stage", pipeline::describe(a));
    }
  }
}

}  // namespace nrl::model
