#include "apps/model/layer.h"

#include "apps/model/stage.h"
#include "core/base/error.h"

namespace nrl::model {

using memory::Pass;

bool Run::enter(Pass pass, memory::Modes modes, std::string_view name, Reads reads, const Writes& writes) {
  if (table_) {
    table_->add(memory::Step{name, pass, modes, reads.set, writes.set, writes.take_over});
    return false;
  }
  const int step = cursor_++;
  switch (pass) {
    case Pass::forward:
      if ((modes & mode_) == 0) return false;
      if (mode_ == memory::recompute && ((only_ >> step) & 1) == 0) return false;
      break;
    case Pass::data:
      if (!data_) return false;
      break;
    case Pass::weight:
      if (!weight_) return false;
      break;
  }
  if (pass != Pass::forward) stage_->recompute(*this, reads.set);
  if (!stage_->tick(*this, layer_->table().steps()[static_cast<size_t>(step)])) return false;
  touched_ = reads.set | writes.set;
  return true;
}

Tensor Run::operator[](Slot slot) const {
  if (!slot) return {};
  NRL_CHECK((touched_ & slot.bit()) != 0, "a step of {} touches the slot {}, which it does not name",
            layer_->name(), layer_->table().slots()[static_cast<size_t>(slot.id)].name);
  return stage_->tensor(*this, slot);
}

Tensor Run::weight(int parameter) const {
  return parameter < 0 ? Tensor{} : context_->parameters[static_cast<size_t>(parameter)].weight;
}

Tensor Run::grad(int parameter) const {
  return parameter < 0 ? Tensor{} : context_->parameters[static_cast<size_t>(parameter)].grad;
}

void Run::gradient_ready(std::initializer_list<int> parameters) const {
  if (!last_ || !context_->gradient_ready) return;
  for (int p : parameters)
    if (p >= 0) context_->gradient_ready(p);
}

ops::FusedDropout Run::dropout(float p, int layer, DropoutSite site) const {
  const bool drops = (mode_ & (memory::evaluation | memory::generation)) == 0;
  return {.p = drops ? p : 0.0f,
          .seed = context_->seed,
          .stream = (static_cast<uint64_t>(layer + 1) << 4) | static_cast<uint64_t>(site),
          .first_row = batch_->first_row,
          .step = batch_->step};
}

void Run::drop(const Tensor& x, const Tensor& residual, const Tensor& out, float p, int layer,
               DropoutSite site) const {
  const ops::FusedDropout d = dropout(p, layer, site);
  ops::dropout(exec(), {.x = x,
                        .residual = residual,
                        .out = out,
                        .p = d.p,
                        .seed = d.seed,
                        .stream = d.stream,
                        .first_row = d.first_row,
                        .step = d.step});
}

void Layer::describe() {
  Run run;
  run.table_ = &table_;
  run.context_ = &context_;
  run.layer_ = this;
  forward(run);
  backward(run);
  recompute(0);
}

}  // namespace nrl::model
