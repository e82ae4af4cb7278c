#include "apps/model/program/interpreter.h"

#include <algorithm>
#include <deque>

#include "core/trace/trace.h"

namespace nrl::model {

using pipeline::Action;
using pipeline::ActionKind;

namespace {

/// The pass that an action executes, if any.
std::optional<Stage::Pass> pass_of(const Action& a) {
  switch (a.kind) {
    case ActionKind::forward:
      return Stage::Pass{.chunk = a.chunk, .stash = a.stash, .parts = {}};
    case ActionKind::backward:
    case ActionKind::backward_data:
    case ActionKind::backward_weight:
      return Stage::Pass{.backward = true,
                         .chunk = a.chunk,
                         .stash = a.stash,
                         .parts = {.dgrad = a.kind != ActionKind::backward_weight,
                                   .wgrad = a.kind != ActionKind::backward_data}};
    default:
      return {};
  }
}

/// The first pass from this action on.
std::optional<Stage::Pass> next_pass(const pipeline::Schedule& schedule, size_t action) {
  for (; action < schedule.actions.size(); ++action)
    if (const auto pass = pass_of(schedule.actions[action])) return pass;
  return {};
}

}  // namespace

std::vector<LayerVisit> layer_visits(const pipeline::Schedule& schedule, const Stage& stage) {
  std::vector<LayerVisit> visits;
  for (const Action& a : schedule.actions) {
    const bool backward = a.kind == ActionKind::backward || a.kind == ActionKind::backward_data ||
                          a.kind == ActionKind::backward_weight;
    if (!backward && a.kind != ActionKind::forward) continue;
    const bool dgrad = a.kind != ActionKind::backward_weight, wgrad = a.kind != ActionKind::backward_data;
    const Chunk& layers = stage.layers(a.chunk);
    for (size_t i = 0; i < layers.size(); ++i) {
      const size_t l = backward ? layers.size() - 1 - i : i;
      if (backward && dgrad)
        for (const Recomputation::Visit& again : stage.recomputation(a.chunk).before(l))
          visits.push_back({.layer = layers[static_cast<size_t>(again.layer)].get()});
      visits.push_back({.layer = layers[l].get(), .backward = backward, .dgrad = dgrad, .wgrad = wgrad});
    }
  }
  return visits;
}

Boundary boundary_of(ActionKind message) {
  switch (message) {
    case ActionKind::send_forward:
      return Boundary::output;
    case ActionKind::post_forward:
    case ActionKind::receive_forward:
      return Boundary::input;
    case ActionKind::send_backward:
      return Boundary::input_gradient;
    case ActionKind::post_backward:
    case ActionKind::receive_backward:
      return Boundary::output_gradient;
    default:
      NRL_CHECK(false, "action {} is no message", static_cast<int>(message));
  }
  return Boundary::input;
}

namespace {

/// Executes sends and receives; in a dry run it only records their buffers.
class Messages {
 public:
  Messages(const Execution& on, std::span<const MicroBatch> batches) : on_(on), batches_(batches) {}

  void send(const Action& a) {
    const Tensor data = tensor(a, false);
    comm::Handle handle;
    if (on_.messages)
      handle = on_.messages->send(a.kind, comm::ConstView(data.data, data.numel(), data.dtype), stream());
    unfinished_.push_back({a, std::move(handle)});
  }

  void post(const Action& a) {
    const ActionKind completed =
        a.kind == ActionKind::post_forward ? ActionKind::receive_forward : ActionKind::receive_backward;
    posted_.push_back({a, start(completed, a)});
  }

  void receive(const Action& a) {
    const trace::Range range("receive");
    const auto posted = std::find_if(posted_.begin(), posted_.end(), [&](const Pending& p) {
      return boundary_of(p.action.kind) == boundary_of(a.kind) && p.of(a);
    });
    if (posted == posted_.end()) return start(a.kind, a).wait();
    tensor(a, false);  // in use since it was posted
    posted->handle.wait();
    posted_.erase(posted);
  }

  void finish(const Action& a) {
    const auto sent =
        std::find_if(unfinished_.begin(), unfinished_.end(), [&](const Pending& s) { return s.of(a); });
    NRL_CHECK(sent != unfinished_.end(), "{} without a send", pipeline::describe(a));
    const trace::Range range("finish_send");
    tensor(sent->action, false);  // in use until now
    sent->handle.wait();
    unfinished_.erase(sent);
  }

 private:
  struct Pending {
    Action action;
    comm::Handle handle;
    bool of(const Action& a) const { return action.chunk == a.chunk && action.microbatch == a.microbatch; }
  };

  comm::Handle start(ActionKind receive, const Action& a) {
    const Tensor data = tensor(a, true);
    if (!on_.messages) return {};
    return on_.messages->receive(receive, comm::View(data.data, data.numel(), data.dtype), stream());
  }
  Tensor tensor(const Action& a, bool begins) {
    return on_.stage.message(a.chunk, a.stash, boundary_of(a.kind),
                             batches_[static_cast<size_t>(a.microbatch)], begins);
  }
  comm::StreamRef stream() const { return {on_.stage.exec().stream}; }

  const Execution& on_;
  std::span<const MicroBatch> batches_;
  std::deque<Pending> unfinished_, posted_;  // sends and receives
};

}  // namespace

void execute(const pipeline::Schedule& schedule, const Execution& on, std::span<const MicroBatch> batches,
             const StepHooks& hooks) {
  Stage& stage = on.stage;
  const bool alone = on.layout.stages == 1;
  Messages messages(on, batches);
  const auto stash_of = [&](int chunk, const Action& a) {
    return a.microbatch % schedule.stashes[static_cast<size_t>(chunk)];
  };
  const auto call = [&](const std::function<void()>& hook) {
    if (hook && !stage.recording()) hook();
  };
  stage.begin(on.program);
  for (size_t i = 0; i < schedule.actions.size(); ++i) {
    const Action& a = schedule.actions[i];
    if (pass_of(a)) stage.expect(next_pass(schedule, i + 1));
    const auto batch = [&]() -> const MicroBatch& { return batches[static_cast<size_t>(a.microbatch)]; };
    // Passes of a chunk are in the order of microbatches.
    const Stage::Order order{.first = on.first && a.microbatch == 0, .last = a.last};
    const auto backward = [&](bool dgrad, bool wgrad) {
      const trace::Range range("backward_pass");
      stage.backward(a.chunk, a.stash, batch(), {.dgrad = dgrad, .wgrad = wgrad}, order);
    };
    switch (a.kind) {
      case ActionKind::forward: {
        const trace::Range range("forward_pass");
        stage.forward(a.chunk, a.stash, batch(), order);
        const bool last = on.layout.last_stage() && a.chunk + 1 == stage.chunks();
        if (last && hooks.log_probs_ready && !stage.recording()) hooks.log_probs_ready(a.microbatch);
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
        if (alone)
          stage.receive_forward(a.chunk, a.stash, stash_of(a.chunk - 1, a));
        else
          messages.receive(a);
        break;
      case ActionKind::receive_backward:
        if (alone)
          stage.receive_backward(a.chunk, a.stash, stash_of(a.chunk + 1, a));
        else
          messages.receive(a);
        break;
      case ActionKind::send_forward:
      case ActionKind::send_backward:
        NRL_CHECK(!alone, "{} in a schedule with a single stage", pipeline::describe(a));
        messages.send(a);
        break;
      case ActionKind::post_forward:
      case ActionKind::post_backward:
        messages.post(a);
        break;
      case ActionKind::finish_send:
        messages.finish(a);
        break;
      case ActionKind::finish_reduce:
        call(hooks.finish_reduce);
        break;
      case ActionKind::step: {
        const trace::Range range("optimizer_step");
        call(hooks.update);
        break;
      }
    }
  }
  stage.end();
}

}  // namespace nrl::model
