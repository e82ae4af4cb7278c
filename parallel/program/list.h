#pragma once
// Lists the steps of a layer's table; for the passes of this directory.

#include <algorithm>

#include "parallel/program/program.h"

namespace nrl::program {

/// An empty list, with room for the steps of `from`.
inline Program extension_of(const Program& from) {
  Program out{.mode = from.mode, .stashes = from.stashes};
  out.steps.reserve(from.steps.size());
  out.uses.reserve(from.uses.size());
  return out;
}

/// Gives a list the period of the one that it is made from. Must be called before entry i of that one is
/// taken.
inline void take_period(Program& out, const Period& from, size_t i) {
  if (i == from.begin) out.period.begin = out.steps.size();
  if (i != from.end) return;
  const size_t begin = out.period.begin;
  out.period = from;
  out.period.begin = begin;
  out.period.end = out.steps.size();
}

/// The slots that a step writes: their contents begin there or go on.
struct Writing {
  memory::SlotSet begins = 0, goes_on = 0;
  memory::SlotSet second = 0;  ///< the contents are in the second buffer
};

/// Adds a step that accesses these slots of its layer.
inline void add(Program& program, const Layers& layers, const Step& step, memory::SlotSet reads,
                const Writing& writes) {
  const Layer& layer = layers.of(step.layer);
  program.add(step, {}, {});
  Step& added = program.steps.back();
  const auto list = [&](const memory::SlotSet& set) {
    const size_t before = program.uses.size();
    memory::for_each_slot(set, [&](size_t s) {
      if (layer.slots[s] >= 0) program.uses.emplace_back(layer.slots[s], writes.second[s]);
    });
    return static_cast<uint16_t>(program.uses.size() - before);
  };
  added.reads = list(reads | writes.goes_on);
  added.writes = list(writes.begins | writes.goes_on);
}

/// The number of rounds that a list has: contents that live from one round to the next do so from the second
/// to the third as well.
inline int listed_rounds(const memory::RoundsRange& r) {
  return std::min(r.most, 3);
}

/// The slots whose contents go on where a step in this round of the list writes them: those that the rounds
/// fill, and in later backward rounds those that a step after the rounds reads. A backward pass may end with
/// any round of the list, so that the contents of the first one must not be lost in the others.
inline memory::SlotSet carried_into(const memory::LayerTable& table, const memory::RoundsRange& range,
                                    bool backward, int round) {
  if (listed_rounds(range) == 1) return 0;
  memory::SlotSet carried = range.carried.bit();
  if (!backward || round == 0) return carried;
  memory::SlotSet written = 0, read = 0;
  const auto& steps = table.steps();
  for (auto i = static_cast<size_t>(range.begin); i < steps.size(); ++i)
    if (i < static_cast<size_t>(range.end))
      written |= steps[i].writes;
    else
      read |= steps[i].reads;
  return carried | (written & read);
}

/// Calls step(index, round, carried) for the steps [begin, end) of a table in the order in which they are
/// executed, and carry(slot) where rounds begin to fill a slot. `round`: place in the list, -1 outside of
/// rounds. `carried`: carried_into() the round. `single`: the steps are part of a round already, and run
/// once.
template <class StepF, class Carry>
void for_each_step(const memory::LayerTable& table, bool backward, bool single, StepF&& step, Carry&& carry) {
  const int begin = backward ? table.forward_steps() : 0;
  const int end = backward ? static_cast<int>(table.steps().size()) : table.forward_steps();
  for (int i = begin; i < end;) {
    const auto range = std::find_if(table.rounds().begin(), table.rounds().end(),
                                    [&](const memory::RoundsRange& r) { return r.begin == i && r.end > i; });
    if (single || range == table.rounds().end()) {
      step(i++, -1, memory::SlotSet{0});
      continue;
    }
    const int n = listed_rounds(*range);
    if (n > 1 && range->carried) carry(range->carried);
    for (int round = 0; round < n; ++round) {
      const memory::SlotSet carried = carried_into(table, *range, backward, round);
      for (int k = range->begin; k < range->end; ++k) {
        // The forward pass ends with round 0, with which the backward pass begins.
        const bool zero = round == (backward ? 0 : n - 1);
        if (zero || table.steps()[k].rounds != memory::Rounds::once) step(k, round, carried);
      }
    }
    i = range->end;
  }
}

}  // namespace nrl::program
