// The part of Run that needs the stage: step selection, dry run and access to slots.
#include "apps/model/program/stage.h"
#include "core/base/error.h"

namespace nrl::model {

using memory::Pass;

bool Run::enter(Pass pass, memory::Modes modes, std::string_view name, Reads reads, const Writes& writes) {
  if (table_) {
    table_->add(memory::Step{.name = name,
                             .pass = pass,
                             .modes = modes,
                             .reads = reads.set,
                             .writes = writes.set,
                             .take_over = writes.take_over,
                             .remakes = writes.remakes});
    return false;
  }
  const int step = cursor_++;
  if (skips_) return false;
  switch (pass) {
    case Pass::forward:
      if ((modes & mode_) == 0) return false;
      if (mode_ == memory::recompute && ((recompute_steps_ >> step) & 1) == 0) return false;
      break;
    case Pass::data:
      if (!dgrad_) return false;
      break;
    case Pass::weight:
      if (!wgrad_) return false;
      break;
  }
  memory::SlotSet remade = 0;
  if (pass != Pass::forward) {
    stage_->recompute(*this, reads.set);
    remade = stage_->remake(*this, writes.remakes);
  }
  if (!stage_->tick(*this, layer_->table().steps()[static_cast<size_t>(step)], remade)) return false;
  accessible_ = reads.set | writes.set | remade;
  return true;
}

const memory::LayerPolicy& Run::policy() const {
  return layer_->policy(round_.again);
}

bool Run::executes() const {
  return !table_ && !stage_->recording();
}

void Run::rounds(int n, int most, Slot carried, const std::function<void()>& steps) {
  if (table_) {
    table_->begin_rounds();
    steps();
    table_->end_rounds();
    return;
  }
  if (round_.recomputes) return steps();  // what a step of a round needs
  // What lives from one round to the next does so from the second to the third as well.
  if (stage_->recording()) n = std::min(most, 3);
  const bool backward = dgrad_ || wgrad_;
  NRL_CHECK(n == 1 || dgrad_ == wgrad_, "{} has {} rounds, and its gradients are computed apart",
            layer_->name(), n);
  const int first_step = cursor_;
  stage_->begin_rounds(*this, n > 1 ? carried : Slot{});
  for (int i = 0; i < n; ++i) {
    // The forward pass keeps the slots of its last round, with which the backward pass begins.
    round_ = {.index = backward ? i : n - 1 - i,
              .recomputes = backward,
              .again = backward && i > 0,
              .last = i + 1 == n,
              .carried = n > 1 ? carried.bit() : 0};
    if (round_.again) frame_->made[static_cast<size_t>(index_)] &= ~layer_->table().in_rounds();
    cursor_ = first_step;
    stage_->enter_round(round_.index, !backward);
    steps();
  }
  stage_->end_rounds();
  round_ = {};
}

void Run::once(const std::function<void()>& steps) {
  if (table_) {
    table_->end_rounds();
    steps();
    table_->begin_rounds();
    return;
  }
  // A recomputation chooses its steps itself.
  skips_ = round_.index > 0 && !(recomputes() && round_.recomputes);
  const bool last = std::exchange(round_.last, true);
  steps();
  round_.last = last;
  skips_ = false;
}

std::span<int32_t> Run::host_values() const {
  return frame_->host.at(static_cast<size_t>(index_));
}

Tensor Run::operator[](Slot slot) const {
  if (!slot) return {};
  NRL_CHECK((accessible_ & slot.bit()) != 0, "a step of {} accesses the slot {}, which it does not name",
            layer_->name(), layer_->table().slots()[static_cast<size_t>(slot.id)].name);
  return stage_->tensor(*this, slot);
}

}  // namespace nrl::model
