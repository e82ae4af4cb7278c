#include "core/base/error.h"
#include "parallel/program/list.h"
#include "parallel/program/lower.h"

namespace nrl::program {

using memory::SlotSet;

namespace {

/// Forward steps, as bits, that a layer runs again in a visit of its own.
struct Rerun {
  int layer = 0;
  uint64_t steps = 0;
};

/// The visits of lower layers before the backward visit of a layer; if dgrad and wgrad have visits of their
/// own, before the dgrad visit.
class Reruns {
 public:
  explicit Reruns(const Layers& layers)
      : layers_(layers), made_(layers.layers.size()), before_(layers.layers.size()) {
    for (int l = static_cast<int>(layers.layers.size()) - 1; l >= 0; --l) {
      const Layer& layer = layers.of(l);
      uint64_t steps = 0;
      SlotSet& made = made_[l];
      SlotSet now = made;
      for (const memory::Step& step : layer.table->steps()) {
        if (step.pass == memory::Pass::forward) continue;
        steps |= layer.policy->steps_for(step.reads, now);
        now |= step.remakes & layer.policy->recomputed();
      }
      make(l, layer.table->reads_of(steps), l);
      made = now;
    }
  }
  const std::vector<Rerun>& before(int layer) const { return before_[layer]; }

 private:
  /// Makes what a layer reads through its ports, for the backward visit of layer `top`.
  void make(int layer, SlotSet reads, int top) {
    const Layer& above = layers_.of(layer);
    if (layer == layers_.begin(above.chunk)) return;
    const Layer& own = layers_.of(layer - 1);
    const memory::Ports& ports = above.ports;
    const SlotSet wanted = ((reads & ports.x.bit()) != 0 ? own.ports.out.bit() : 0) |
                           ((reads & ports.residual.bit()) != 0 ? own.ports.sum.bit() : 0);
    const uint64_t steps = own.policy->steps_for(wanted, made_[static_cast<size_t>(layer) - 1]);
    if (steps == 0) return;
    make(layer - 1, own.table->reads_of(steps), top);
    before_[top].push_back({layer - 1, steps});
  }

  const Layers& layers_;
  std::vector<SlotSet> made_;
  std::vector<std::vector<Rerun>> before_;
};

class Recomputing {
 public:
  Recomputing(const Program& program, const Layers& layers)
      : p_(program), layers_(layers), reruns_(layers), out_(extension_of(program)) {
    for (const Layer& layer : layers.layers)
      made_.emplace_back(static_cast<size_t>(program.stashes.count(layer.chunk)));
  }

  Program all() {
    for (size_t i = 0; i < p_.steps.size(); ++i) {
      take_period(out_, p_.period, i);
      const Step& s = p_.steps[i];
      if (s.kind == StepKind::visit) visit(s);
      if (s.kind == StepKind::compute && s.backward)
        compute(s);
      else
        out_.take(p_, s);
    }
    return std::move(out_);
  }

 private:
  /// The slots of a layer that were recomputed for a microbatch.
  struct Made {
    SlotSet slots = 0;
    SlotSet by_one_round = 0;  ///< among them: also where its rounds are a single one
    void add(SlotSet more) {
      slots |= more;
      by_one_round |= more;
    }
  };
  Made& made(int layer, int microbatch) {
    return made_[layer][p_.stashes.of(layers_.of(layer).chunk, microbatch)];
  }

  void visit(const Step& v) {
    round_ = 0;
    if (!v.backward) {
      made(v.layer, v.microbatch) = {};
      return;
    }
    if (!v.dgrad) return;
    for (const Rerun& again : reruns_.before(v.layer)) {
      const Layer& layer = layers_.of(again.layer);
      made(again.layer, v.microbatch).add(layer.table->writes_of(again.steps) & layer.policy->recomputed());
      Step s = v;
      s.backward = s.dgrad = s.wgrad = s.starts = s.ends = false;
      s.again = true;
      s.layer = again.layer;
      run_again(s, again.steps, *layer.policy, 0);
    }
  }

  void compute(const Step& s) {
    const Layer& layer = layers_.of(s.layer);
    const memory::Step& step = layer.table->steps()[s.index];
    const memory::LayerPolicy& policy = s.round > 0 ? *layer.later : *layer.policy;
    Made& done = made(s.layer, s.microbatch);
    if (s.round > round_) {  // keeps nothing of the round before
      done.slots &= ~layer.table->in_rounds();
      round_ = s.round;
    }
    if ((step.reads & policy.recomputed() & ~(s.round > 0 ? done.slots : done.by_one_round)) != 0) {
      Step v = s;
      v.kind = StepKind::visit;
      v.backward = v.dgrad = v.wgrad = false;
      v.again = v.nested = true;
      const uint64_t needed = policy.steps_for(step.reads, done.slots);
      if (s.round <= 0) {
        // In a list of several rounds a later one has made some of it. A run of one round must do so here.
        const uint64_t of_one = policy.steps_for(step.reads, done.by_one_round) & ~needed;
        v.one_round = true;
        if (of_one != 0) run_again(v, of_one, policy, carried(s));
        v.one_round = false;
      }
      if (needed != 0) run_again(v, needed, policy, carried(s));
    }
    const SlotSet remade = step.remakes & policy.recomputed() & ~done.slots;
    done.slots |= remade;
    if (s.round <= 0) done.by_one_round |= remade;
    if (remade == 0) {
      out_.take(p_, s);
      return;
    }
    const SlotSet goes_on = step.writes & (step.reads | carried(s));
    add(out_, layers_, s, step.reads,
        {.begins = (step.writes | remade) & ~goes_on,
         .goes_on = goes_on,
         .second = remade & layer.policy->recomputed()});
  }

  /// carried_into() the round of a step.
  SlotSet carried(const Step& s) const {
    if (s.round < 0) return 0;
    const memory::LayerTable& table = *layers_.of(s.layer).table;
    for (const memory::RoundsRange& r : table.rounds())
      if (s.index >= r.begin && s.index < r.end) return carried_into(table, r, s.backward, s.round);
    return 0;
  }

  /// Adds the visit and these steps. `outer`: carried into the round around a nested visit.
  void run_again(Step s, uint64_t steps, const memory::LayerPolicy& policy, SlotSet outer) {
    out_.add(s, {}, {});
    const Layer& layer = layers_.of(s.layer);
    const int round = s.round;
    for_each_step(
        *layer.table, false, round >= 0,
        [&](int index, int in, SlotSet carried) {
          const memory::Step& step = layer.table->steps()[index];
          if ((step.modes & memory::recompute) == 0 || ((steps >> index) & 1) == 0) return;
          s.kind = StepKind::compute;
          s.index = static_cast<int16_t>(index);
          s.round = static_cast<int8_t>(round >= 0 ? round : in);
          // A step that runs again also rewrites slots that were kept, with identical bits.
          const SlotSet new_contents = step.writes & ~step.reads & ~(carried | outer) & policy.recomputed();
          const SlotSet begins = s.one_round ? 0 : new_contents;
          add(out_, layers_, s, step.reads,
              {.begins = begins,
               .goes_on = step.writes & ~begins,
               .second = new_contents & layer.policy->recomputed()});
        },
        [&](memory::Slot slot) {
          if ((slot.bit() & policy.recomputed()) == 0) return;
          s.kind = StepKind::carry;
          s.round = -1;
          add(out_, layers_, s, 0, {.begins = slot.bit(), .second = slot.bit() & layer.policy->recomputed()});
        });
  }

  const Program& p_;
  const Layers& layers_;
  const Reruns reruns_;
  Program out_;
  std::vector<std::vector<Made>> made_;  // by layer and stash
  int round_ = 0;                        // of the visit
};

}  // namespace

Program add_recompute(Program program, const Layers& layers) {
  const bool any = std::any_of(layers.layers.begin(), layers.layers.end(),
                               [](const Layer& l) { return l.later->recomputed() != 0; });
  return any && program.mode == memory::training ? Recomputing(program, layers).all() : program;
}

}  // namespace nrl::program
