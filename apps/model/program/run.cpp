// The part of Run that needs the executor: selection of steps, rounds and access to slots.
#include "apps/model/program/executor.h"
#include "core/base/error.h"

namespace nrl::model {

bool Run::enter(memory::Pass pass, memory::Modes modes, std::string_view name, Reads reads,
                const Writes& writes) {
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
  inside_ = executor_->enter(*this, cursor_++);
  return inside_;
}

void Run::rounds(int n, int most, Slot carried, const std::function<void()>& steps) {
  if (table_) {
    table_->begin_rounds(most, carried);
    steps();
    table_->end_rounds();
    return;
  }
  if (round_.recomputes) return steps();  // what a step of a round needs
  const bool backward = dgrad_ || wgrad_;
  NRL_CHECK(n == 1 || dgrad_ == wgrad_, "{} has {} rounds, and its gradients are computed apart",
            layer_->name(), n);
  const int first_step = cursor_;
  rounds_ = n;
  const Executor::ListedRounds listed = executor_->rounds(*this);
  for (int i = 0; i < n; ++i) {
    if (layer_->context().few_rounds && i > 0 && i + 1 < n) continue;
    // The forward pass keeps the slots of its last round, with which the backward pass begins.
    round_ = {.index = backward ? i : n - 1 - i,
              .recomputes = backward,
              .again = backward && i > 0,
              .last = i + 1 == n};
    cursor_ = first_step;
    executor_->enter_round(*this, listed, round_.index, !backward);
    steps();
  }
  executor_->end_rounds(*this, listed);
  round_ = {};
}

void Run::once(const std::function<void()>& steps) {
  if (table_) {
    table_->set_once(true);
    steps();
    table_->set_once(false);
    return;
  }
  const bool last = std::exchange(round_.last, true);
  steps();
  round_.last = last;
}

std::span<int32_t> Run::host_values() const {
  return executor_->host_values(*this);
}

Tensor Run::operator[](Slot slot) const {
  if (!slot) return {};
  NRL_CHECK(inside_ && executor_->names(*this, slot),
            "a step of {} accesses the slot {}, which it does not name", layer_->name(),
            layer_->table().slots()[slot.id].name);
  return executor_->tensor(*this, slot);
}

Tensor Run::remade(Slot slot) const {
  return slot && inside_ && executor_->names(*this, slot) ? (*this)[slot] : Tensor{};
}

}  // namespace nrl::model
