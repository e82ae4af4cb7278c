#include "parallel/program/lower.h"

#include "core/base/error.h"
#include "parallel/program/list.h"

namespace nrl::program {

using memory::SlotSet;
using pipeline::Action;
using pipeline::ActionKind;

namespace {

class Lowering {
 public:
  Lowering(const Layers& layers, memory::Mode mode, const pipeline::Schedule& schedule, bool alone,
           bool reports)
      : layers_(layers), schedule_(schedule), alone_(alone), reports_(reports) {
    out_.mode = mode;
    out_.stashes = schedule.stashes;
  }

  Program all() {
    for (size_t i = 0; i < schedule_.actions.size(); ++i) {
      take_period(out_, schedule_.period, i);
      add(schedule_.actions[i]);
    }
    return std::move(out_);
  }

 private:
  void add(const Action& a) {
    switch (a.kind) {
      case ActionKind::forward:
        pass(a, false, false, false);
        if (reports_ && a.chunk + 1 == layers_.chunks())
          out_.add({.kind = StepKind::report, .chunk = short_of(a.chunk), .microbatch = a.microbatch}, {},
                   {});
        break;
      case ActionKind::backward:
      case ActionKind::backward_data:
      case ActionKind::backward_weight:
        pass(a, true, a.kind != ActionKind::backward_weight, a.kind != ActionKind::backward_data);
        break;
      case ActionKind::receive_forward:
      case ActionKind::receive_backward:
        receive(a, a.kind == ActionKind::receive_backward);
        break;
      case ActionKind::post_forward:
      case ActionKind::post_backward:
        start(StepKind::receive, a, a.kind == ActionKind::post_backward);
        break;
      case ActionKind::send_forward:
      case ActionKind::send_backward:
        NRL_CHECK(!alone_, "{} in a schedule with a single stage", pipeline::describe(a));
        start(StepKind::send, a, a.kind == ActionKind::send_backward);
        break;
      case ActionKind::finish_send:
        finish(a, [&](const Step& s) { return s.kind == StepKind::send; });
        break;
      case ActionKind::finish_reduce:
        out_.add({.kind = StepKind::wait, .of = StepKind::reduce}, {}, {});
        break;
      case ActionKind::step:
        out_.add({.kind = StepKind::update}, {}, {});
        break;
    }
  }

  void pass(const Action& a, bool backward, bool dgrad, bool wgrad) {
    const int begin = layers_.begin(a.chunk), end = layers_.end(a.chunk);
    for (int i = 0; i < end - begin; ++i)
      visit({.kind = StepKind::visit,
             .backward = backward,
             .dgrad = dgrad,
             .wgrad = wgrad,
             .starts = i == 0,
             .ends = begin + i + 1 == end,
             .last = a.last,
             .chunk = short_of(a.chunk),
             .layer = backward ? end - 1 - i : begin + i,
             .microbatch = a.microbatch});
  }

  void visit(Step v) {
    out_.add(v, {}, {});
    const memory::LayerTable& table = *layers_.of(v.layer).table;
    const auto executed = [&](const memory::Step& step) {
      if (step.pass == memory::Pass::forward) return (step.modes & out_.mode) != 0;
      return step.pass == memory::Pass::data ? v.dgrad : v.wgrad;
    };
    v.starts = v.ends = false;
    for_each_step(
        table, v.backward, false,
        [&](int index, int round, SlotSet carried) {
          const memory::Step& step = table.steps()[index];
          if (!executed(step)) return;
          v.kind = StepKind::compute;
          v.index = short_of(index);
          v.round = static_cast<int8_t>(round);
          const SlotSet goes_on = step.writes & (step.reads | carried);
          program::add(out_, layers_, v, step.reads, {.begins = step.writes & ~goes_on, .goes_on = goes_on});
        },
        [&](memory::Slot slot) {
          v.kind = StepKind::carry;
          v.round = -1;
          program::add(out_, layers_, v, 0, {.begins = slot.bit()});
        });
  }

  /// The slot at the beginning of a chunk (as its first layer hands it on) or at its end.
  SlotId boundary(int chunk, bool at_end, bool backward) const {
    const int layer = at_end ? layers_.end(chunk) - 1 : layers_.begin(chunk);
    const memory::Ports& ports = layers_.of(layer).ports;
    return layers_.slot(layer, !backward ? ports.out : at_end ? ports.d_x : ports.d_out);
  }

  Step message(StepKind kind, const Action& a, bool backward) const {
    return {.kind = kind, .backward = backward, .chunk = short_of(a.chunk), .microbatch = a.microbatch};
  }

  void start(StepKind kind, const Action& a, bool backward) {
    const Use use(boundary(a.chunk, (kind == StepKind::send) != backward, backward), false);
    const std::span<const Use> uses(&use, 1);
    out_.add(message(kind, a, backward), kind == StepKind::send ? uses : std::span<const Use>{},
             kind == StepKind::send ? std::span<const Use>{} : uses);
    unfinished_.push_back(out_.steps.back());
  }

  void receive(const Action& a, bool backward) {
    if (alone_) {
      const Use from(boundary(a.chunk + (backward ? 1 : -1), !backward, backward), false);
      const Use to(boundary(a.chunk, backward, backward), false);
      out_.add(message(StepKind::copy, a, backward), {&from, 1}, {&to, 1});
      return;
    }
    const auto posted = [&](const Step& s) { return s.kind == StepKind::receive && s.backward == backward; };
    if (std::none_of(unfinished_.begin(), unfinished_.end(),
                     [&](const Step& s) { return posted(s) && of(s, a); }))
      start(StepKind::receive, a, backward);
    finish(a, posted);
  }

  /// Waits for the oldest message of the action's chunk and microbatch that `is` accepts.
  template <class F>
  void finish(const Action& a, F&& is) {
    const auto found = std::find_if(unfinished_.begin(), unfinished_.end(),
                                    [&](const Step& s) { return is(s) && of(s, a); });
    NRL_CHECK(found != unfinished_.end(), "{} without a message", pipeline::describe(a));
    const Step s = *found;
    unfinished_.erase(found);
    const std::vector<Use> uses(out_.uses.begin() + s.uses, out_.uses.begin() + s.uses + 1);
    out_.add(wait_for(s), uses, {});
  }
  static bool of(const Step& s, const Action& a) {
    return s.chunk == a.chunk && s.microbatch == a.microbatch;
  }

  static int16_t short_of(int i) { return static_cast<int16_t>(i); }

  const Layers& layers_;
  const pipeline::Schedule& schedule_;
  const bool alone_, reports_;
  Program out_;
  std::vector<Step> unfinished_;  // sends and receives
};

}  // namespace

Program lower(const pipeline::Schedule& schedule, const Layers& layers, memory::Mode mode, bool alone,
              bool reports) {
  return Lowering(layers, mode, schedule, alone, reports).all();
}

}  // namespace nrl::program
