#include "memory/layer_table.h"

#include <bit>

#include "core/base/error.h"

namespace nrl::memory {
namespace {

bool has_word(std::string_view words, std::string_view word) {
  while (!words.empty()) {
    const size_t space = words.find(' ');
    if (words.substr(0, space) == word) return true;
    words = space == std::string_view::npos ? "" : words.substr(space + 1);
  }
  return false;
}

bool recomputes(const Step& step) {
  return step.pass == Pass::forward && (step.modes & recompute) != 0;
}

}  // namespace

Slot LayerTable::add(const SlotSpec& spec) {
  NRL_CHECK(slots_.size() < max_slots, "a layer has more than {} slots", max_slots);
  const Slot slot{static_cast<int16_t>(slots_.size())};
  slots_.push_back(spec);
  if (spec.port) ports_ |= slot.bit();
  return slot;
}

void LayerTable::add(const Step& step) {
  NRL_CHECK(steps_.size() < max_steps, "a layer has more than {} steps", max_steps);
  NRL_CHECK((step.reads & ~(written_ | ports_)) == 0, "step {} reads a slot that no earlier step wrote",
            step.name);
  NRL_CHECK((step.writes & ports_) == 0, "step {} writes a slot of another layer", step.name);
  NRL_CHECK((step.remakes & ~recomputable()) == 0, "step {} remakes a slot that no forward step recomputes",
            step.name);
  if (step.pass == Pass::forward) {
    NRL_CHECK(steps_.size() < max_forward_steps, "a layer has more than {} forward steps", max_forward_steps);
    NRL_CHECK(forward_steps_ == static_cast<int>(steps_.size()), "forward step {} follows backward steps",
              step.name);
    ++forward_steps_;
    if (rounds_ == Rounds::each) in_rounds_ |= step.writes;
  }
  written_ |= step.writes;
  steps_.push_back(step);
  steps_.back().rounds = rounds_;
}

void LayerTable::begin_rounds(int most, Slot carried) {
  const auto next = static_cast<int>(steps_.size());
  ranges_.push_back({.begin = next, .end = next, .most = most, .carried = carried});
  rounds_ = Rounds::each;
}

void LayerTable::end_rounds() {
  ranges_.back().end = static_cast<int>(steps_.size());
  rounds_ = Rounds::none;
}

SlotSet LayerTable::recomputable() const {
  SlotSet able = 0, once = 0, changed = 0, again = 0;
  for (const Step& step : steps_) {
    if (step.pass != Pass::forward) continue;
    if (recomputes(step)) able |= step.writes;
    if (step.modes == recompute) again |= step.writes;
    if ((step.modes & (training | recompute)) != training) continue;
    changed |= step.writes & step.reads;
    once |= step.writes & ~step.reads;
  }
  return able & ~changed & ~(once & ~again);
}

SlotSet LayerTable::inputs() const {
  SlotSet alone = 0;
  for (const Step& step : steps_)
    if (recomputes(step) && (step.reads & ports_) == 0) alone |= step.writes;
  return recomputable() & ~alone;
}

SlotSet LayerTable::reads_of(uint64_t steps) const {
  SlotSet set = 0;
  for (; steps != 0; steps &= steps - 1) set |= steps_[std::countr_zero(steps)].reads;
  return set;
}

SlotSet LayerTable::writes_of(uint64_t steps) const {
  SlotSet set = 0;
  for (; steps != 0; steps &= steps - 1) set |= steps_[std::countr_zero(steps)].writes;
  return set;
}

SlotSet LayerTable::offloadable() const {
  SlotSet set = 0;
  for (const Step& step : steps_)
    if (step.pass == Pass::forward && (step.modes & training) != 0) set |= step.writes;
  return set;
}

SlotSet LayerTable::named(std::string_view rule) const {
  SlotSet set = 0;
  for (size_t s = 0; s < slots_.size(); ++s)
    if (has_word(slots_[s].rules, rule)) set |= SlotSet{1} << s;
  return set;
}

SlotSet LayerTable::with_rule(std::string_view rule) const {
  return named(rule) & recomputable();
}

SlotSet LayerTable::offloadable_with_rule(std::string_view rule) const {
  return named(rule) & offloadable();
}

LayerPolicy::LayerPolicy(const LayerTable& table, SlotSet recomputed, SlotSet offloaded)
    : table_(&table), recomputed_(recomputed), offloaded_(offloaded) {
  NRL_CHECK((recomputed & ~table.recomputable()) == 0,
            "the policy recomputes a slot that is not recomputable");
  NRL_CHECK((offloaded & ~table.offloadable()) == 0,
            "the policy offloads a slot that no forward step writes");
  NRL_CHECK((offloaded & recomputed) == 0, "the policy offloads a slot that is recomputed");
  producer_.fill(-1);
  const SlotSet ports = table.ports();
  const bool from_ports = (recomputed & table.inputs()) != 0;
  // If several steps write a slot: the last one whose inputs are all kept (a step written for recomputation
  // starts from the output of the one before it), else the first one.
  const auto& steps = table.steps();
  for (size_t s = 0; s < table.slots().size(); ++s) {
    const SlotSet bit = SlotSet{1} << s;
    if ((recomputed & bit) == 0) continue;
    for (int i = 0; i < table.forward_steps(); ++i) {
      const Step& step = steps[i];
      if (!recomputes(step) || (step.writes & bit) == 0 || (!from_ports && (step.reads & ports) != 0))
        continue;
      if (producer_[s] < 0 || (step.reads & (recomputed | ports)) == 0) producer_[s] = static_cast<int8_t>(i);
    }
  }
}

uint64_t LayerPolicy::steps_for(SlotSet wanted, SlotSet& made) const {
  uint64_t chosen = 0;
  SlotSet todo = wanted & recomputed_ & ~made;
  while (todo != 0) {
    const auto slot = first_slot(todo);
    const auto index = static_cast<size_t>(producer_[slot]);
    const Step& step = table_->steps()[index];
    chosen |= uint64_t{1} << index;
    made |= step.writes & recomputed_;
    todo = (todo | (step.reads & recomputed_)) & ~made;
  }
  return chosen;
}

}  // namespace nrl::memory
