#include "apps/model/program/layer.h"

#include "core/base/error.h"

namespace nrl::model {

HeadOutput LayerContext::results(int64_t rows) const {
  HeadOutput out = head;
  for (Tensor* t :
       {&out.log_prob, &out.entropy, &out.weight, &out.entropy_weight, &out.top_ids, &out.top_logits})
    if (*t) *t = t->rows(0, rows);
  return out;
}

comm::View view_of(const Tensor& t) {
  NRL_CHECK(t.contiguous(), "{} is communicated", describe(t));
  return {t.data, t.numel(), t.dtype};
}

std::vector<comm::Handle> InFlight::take(Slot slot) {
  const auto found = operations_.find(slot.id);
  if (found == operations_.end()) return {};
  std::vector<comm::Handle> out = std::move(found->second);
  operations_.erase(found);
  return out;
}

Tensor Run::weight(int parameter) const {
  if (parameter < 0) return {};
  if (context_->weight_needed) context_->weight_needed(parameter);
  return context_->parameters[parameter].weight;
}

Tensor Run::grad(int parameter) const {
  return parameter < 0 ? Tensor{} : context_->parameters[parameter].grad;
}

bool Run::accumulates(int parameter) const {
  const ParameterView& p = context_->parameters[parameter];
  return round_.again || (!first_ && !p.grad_per_microbatch) || !p.overwrites_gradient;
}

void Run::gradient_ready(std::initializer_list<int> parameters) const {
  if (!context_->gradient_ready || !round_.last) return;
  for (int p : parameters)
    if (context_->trains(p) && (last_ || context_->parameters[p].grad_per_microbatch))
      context_->gradient_ready(p);
}

comm::Communicator* Run::tensor_ranks() const {
  if (layout().tensor == 1) return nullptr;
  NRL_CHECK(context_->groups, "a layout of {} tensor-parallel ranks without groups", layout().tensor);
  return &(*context_->groups)[parallel::group::tp];
}

comm::Handle Run::all_reduce_async(const Tensor& data) const {
  comm::Communicator* const ranks = tensor_ranks();
  return ranks ? ranks->all_reduce_async(view_of(data), comm::Reduce::sum, comm::StreamRef{exec().stream})
               : comm::Handle{};
}

comm::Handle Run::all_gather_async(const Tensor& in, const Tensor& out) const {
  comm::Communicator* const ranks = tensor_ranks();
  return ranks ? ranks->all_gather_async(view_of(in), view_of(out), comm::StreamRef{exec().stream})
               : comm::Handle{};
}

comm::Handle Run::reduce_scatter_async(const Tensor& in, const Tensor& out) const {
  comm::Communicator* const ranks = tensor_ranks();
  return ranks ? ranks->reduce_scatter_async(view_of(in), view_of(out), comm::Reduce::sum,
                                             comm::StreamRef{exec().stream})
               : comm::Handle{};
}

void Run::all_reduce(const Tensor& data, const parallel::GroupId& group, comm::Reduce operation) const {
  if (!context_->groups) return;
  (*context_->groups)[group]
      .all_reduce_async(view_of(data), operation, comm::StreamRef{exec().stream})
      .wait();
}

comm::Handle Run::exchange_async(std::vector<comm::Message> messages, const comm::Handle& previous) const {
  comm::Communicator* const ranks = tensor_ranks();
  return ranks ? ranks->exchange_async(std::move(messages), {comm::StreamRef{exec().stream}, previous})
               : comm::Handle{};
}

ops::FusedDropout Run::dropout(float p, int layer, DropoutSite site) const {
  const bool drops = (mode_ & (memory::evaluation | memory::generation)) == 0;
  // Masks are the same as on a single rank, so a rank with a part of the tokens starts at its first row.
  const bool some = layout().sequence_parallel && site < DropoutSite::probabilities;
  const int64_t count = batch_->ids.dim(0) / (some ? layout().tensor : 1),
                before = some ? count * layout().tensor_rank : 0;
  // The rows of attention's queries come with the bounds of the calls.
  const bool listed = batch_->dropout_rows && site != DropoutSite::probabilities;
  return {.p = drops ? p : 0.0f,
          .seed = context_->seed,
          .stream = (static_cast<uint64_t>(layer + 1) << 4) | static_cast<uint64_t>(site),
          .first_row = batch_->first_row + (listed ? 0 : before),
          .step = batch_->step,
          .rows = listed ? batch_->dropout_rows.rows(before, count) : Tensor{}};
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
                        .step = d.step,
                        .rows = d.rows});
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
