// The part of Run that needs the stage: step selection, dry run and access to slots.
#include "apps/model/stage.h"
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
