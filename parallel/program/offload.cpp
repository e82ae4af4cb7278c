#include <map>

#include "core/base/error.h"
#include "parallel/program/list.h"
#include "parallel/program/lower.h"

namespace nrl::program {

using memory::SlotSet;

namespace {

/// A visit with the visits that it needs before it.
struct Group {
  size_t begin = 0, visit = 0, end = 0;  ///< steps
};

/// The first group from step i on, which must be a visit.
Group group_at(const Program& p, size_t i) {
  Group g{.begin = i, .visit = i};
  while (p.steps[g.visit].again) g.visit = p.visit_end(g.visit);
  g.end = p.visit_end(g.visit);
  return g;
}

/// A backward visit of a layer, of any microbatch.
struct Visit {
  int layer = 0;
  bool dgrad = false, wgrad = false;
  auto operator<=>(const Visit&) const = default;
};
Visit visit_of(const Step& s) {
  return {s.layer, s.dgrad, s.wgrad};
}

using SlotsByLayer = std::map<int, SlotSet>;
using Uses = std::map<Visit, SlotsByLayer>;
/// The slots whose policies offload them, by the backward visits that use them.
Uses offloaded_uses(const Program& p, const Layers& layers) {
  Uses out;
  if (std::none_of(layers.layers.begin(), layers.layers.end(),
                   [](const Layer& l) { return l.policy->offloaded() != 0; }))
    return out;
  for (size_t i = 0; i < p.steps.size();) {
    if (p.steps[i].kind != StepKind::visit) {
      ++i;
      continue;
    }
    const Group g = group_at(p, i);
    i = g.end;
    if (!p.steps[g.visit].backward) continue;
    SlotsByLayer& uses = out[visit_of(p.steps[g.visit])];
    const auto add = [&](std::span<const Use> of) {
      for (const Use& u : of) {
        const SlotInfo& info = layers.slots[u.slot()];
        if ((layers.of(info.layer).policy->offloaded() & info.slot.bit()) != 0)
          uses[info.layer] |= info.slot.bit();
      }
    };
    for (size_t s = g.begin; s < g.end; ++s) {
      add(p.reads(p.steps[s]));
      if (p.steps[s].again) add(p.writes(p.steps[s]));
    }
  }
  return out;
}

/// The slots that are used, by layer.
std::vector<SlotSet> slots_of(const Uses& uses, const Layers& layers) {
  std::vector<SlotSet> out(layers.layers.size());
  for (const auto& [visit, by_layer] : uses)
    for (const auto& [layer, slots] : by_layer) out[layer] |= slots;
  return out;
}

class Offloading {
 public:
  Offloading(const Program& program, const Layers& layers, Uses uses)
      : p_(program),
        layers_(layers),
        uses_(std::move(uses)),
        slots_(slots_of(uses_, layers)),
        out_(extension_of(program)) {
    for (const Step& s : p_.steps)
      if (s.kind == StepKind::visit && s.starts) passes_.push_back(s);
  }

  Program all() {
    for (size_t i = 0; i < p_.steps.size();) {
      take_period(out_, p_.period, i);
      if (p_.steps[i].kind != StepKind::visit) {
        out_.take(p_, p_.steps[i++]);
        continue;
      }
      const Group g = group_at(p_, i);
      const Step& v = p_.steps[g.visit];
      if (v.starts) ++pass_;
      if (v.starts && !v.backward)
        for (int l = layers_.begin(v.chunk); l < layers_.end(v.chunk); ++l) state(l, v.microbatch) = {};
      if (v.backward) fetch(v);
      prefetch(v);
      for (; i < g.end; ++i) out_.take(p_, p_.steps[i]);
      if (!v.backward)
        offload(v);
      else if (!brief(v.layer))
        finish(offloads_);
    }
    finish(offloads_);
    NRL_CHECK(fetches_.empty(), "offloaded activations were fetched and not used");
    return std::move(out_);
  }

 private:
  /// The slots of a layer that were moved to the host for a microbatch, and those that were fetched back.
  struct Moved {
    SlotSet offloaded = 0, fetched = 0;
  };
  Moved& state(int layer, int microbatch) {
    return moved_[{layer, p_.stashes.of(layers_.of(layer).chunk, microbatch)}];
  }
  const SlotsByLayer& uses(const Visit& v) const {
    static const SlotsByLayer none;
    const auto at = uses_.find(v);
    return at == uses_.end() ? none : at->second;
  }

  /// A visit that is too short to hide a copy: of the embedding, or of the ends of a chunk, which receive and
  /// send; not of the head, which passes nothing on.
  bool brief(int layer) const {
    const int chunk = layers_.of(layer).chunk;
    return layer == layers_.begin(chunk) || (layer + 1 == layers_.end(chunk) && layers_.of(layer).ports.out);
  }
  /// The last layer with an output whose visit is long enough to hide a copy.
  int last_block(int chunk) const {
    int layer = layers_.end(chunk) - 1;
    while (layer > layers_.begin(chunk) && (brief(layer) || !layers_.of(layer).ports.out)) --layer;
    return layer;
  }
  /// The pass after this one; null: none.
  const Step* next_pass() const { return pass_ < passes_.size() ? &passes_[pass_] : nullptr; }

  /// The slots of a layer that a backward pass uses in its first two visits (the head or the end of the
  /// chunk, then the last block).
  SlotSet first_used(int layer, const Step& pass) const {
    SlotSet slots = 0;
    const int end = layers_.end(pass.chunk);
    for (int l = end - 1; l >= std::max(layers_.begin(pass.chunk), end - 2); --l) {
      const SlotsByLayer& used = uses({l, pass.dgrad, pass.wgrad});
      if (const auto at = used.find(layer); at != used.end()) slots |= at->second;
    }
    return slots;
  }

  void offload(const Step& v) {
    SlotSet slots = slots_[v.layer];
    // Layers that move nothing hide copies too, except the last one, after which most slots are kept.
    if (!brief(v.layer) && (slots != 0 || v.layer + 1 >= last_block(v.chunk))) finish(offloads_);
    // A backward pass that follows at once needs its first slots at once.
    const Step* const next = next_pass();
    if (next && next->backward && next->chunk == v.chunk && same_stash(*next, v))
      slots &= ~first_used(v.layer, *next);
    if (slots == 0) return;
    state(v.layer, v.microbatch).offloaded = slots;
    start(StepKind::offload, v.layer, v.microbatch, slots, offloads_);
  }
  bool same_stash(const Step& a, const Step& b) const {
    return p_.stashes.of(a.chunk, a.microbatch) == p_.stashes.of(b.chunk, b.microbatch);
  }

  void fetch(const Step& v) {
    if (uses(visit_of(v)).empty()) return;
    start_fetch(visit_of(v), v.microbatch);
    finish(fetches_);
  }

  void prefetch(const Step& v) {
    if (!fetches_.empty()) return;
    // Fetches for the next visit of a pass below `layer` or, if it needs nothing and `far`, for the next one
    // that does. Returns whether there is a next visit.
    const auto from = [&](const Step& pass, int layer, bool far) {
      bool any = false;
      while (layer-- > layers_.begin(pass.chunk)) {
        if (brief(layer)) continue;
        any = true;
        start_fetch({layer, pass.dgrad, pass.wgrad}, pass.microbatch);
        if (!far || !fetches_.empty()) break;
      }
      return any;
    };
    if (v.backward) {
      // Slots fetched early occupy memory that the blocks above have released.
      if (from(v, v.layer, v.layer < last_block(v.chunk))) return;
    } else {
      for (int l = v.layer + 1; l < layers_.end(v.chunk); ++l)
        if (!brief(l)) return;
    }
    if (const Step* const next = next_pass(); next && next->backward)
      from(*next, layers_.end(next->chunk), false);
  }

  void start_fetch(const Visit& v, int microbatch) {
    for (const auto& [layer, used] : uses(v)) {
      Moved& moved = state(layer, microbatch);
      const SlotSet slots = used & moved.offloaded & ~moved.fetched;
      if (slots == 0) continue;
      const bool leaving = std::any_of(offloads_.begin(), offloads_.end(), [&, of = layer](const Started& c) {
        return c.step.layer == of && same_stash(c.step, step_of(of, microbatch));
      });
      if (leaving) finish(offloads_);
      moved.fetched |= slots;
      start(StepKind::fetch, layer, microbatch, slots, fetches_);
    }
  }
  Step step_of(int layer, int microbatch) const {
    return {.chunk = static_cast<int16_t>(layers_.of(layer).chunk), .layer = layer, .microbatch = microbatch};
  }

  struct Started {
    Step step;
    SlotSet slots = 0;
  };
  void start(StepKind kind, int layer, int microbatch, SlotSet slots, std::vector<Started>& to) {
    Step s = step_of(layer, microbatch);
    s.kind = kind;
    to.push_back({s, slots});
    list(s, kind, slots);
  }
  void finish(std::vector<Started>& of) {
    for (const Started& c : of) list(wait_for(c.step), c.step.kind, c.slots);
    of.clear();
  }
  void list(const Step& s, StepKind kind, SlotSet slots) {
    if (kind == StepKind::offload)
      add(out_, layers_, s, slots, {});
    else
      add(out_, layers_, s, 0, {.begins = slots, .second = slots});
  }

  const Program& p_;
  const Layers& layers_;
  const Uses uses_;
  const std::vector<SlotSet> slots_;  // by layer
  std::vector<Step> passes_;          // their first visits
  size_t pass_ = 0;                   // index in `passes_` of the pass after this one
  Program out_;
  std::map<std::pair<int, int>, Moved> moved_;  // by layer and stash
  std::vector<Started> offloads_, fetches_;     // that are not yet waited for
};

}  // namespace

std::vector<SlotSet> offloaded_slots(const Program& program, const Layers& layers) {
  return slots_of(offloaded_uses(program, layers), layers);
}

Program add_offload(Program program, const Layers& layers) {
  if (program.mode != memory::training) return program;
  Uses uses = offloaded_uses(program, layers);
  const bool any =
      std::any_of(uses.begin(), uses.end(), [](const auto& visit) { return !visit.second.empty(); });
  return any ? Offloading(program, layers, std::move(uses)).all() : program;
}

}  // namespace nrl::program
