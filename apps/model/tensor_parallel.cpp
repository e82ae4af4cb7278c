#include "apps/model/tensor_parallel.h"

namespace nrl::model {

ColumnInput::ColumnInput(const ModelLayout& layout, const AddSlot& add, Slot in, Slot d_in, int64_t hidden,
                         DType in_type, DType d_in_type)
    : x(in), d_x(d_in), in_(in), d_in_(d_in) {
  if (!layout.sequence_parallel) return;
  x = add({.name = "gathered", .width = hidden, .dtype = in_type, .rules = gather_rule});
  d_x = add({.name = "d_gathered", .width = hidden, .dtype = d_in_type});
}

void ColumnInput::gather(Run& r) const {
  if (x.id != in_.id) r.step("gather", reads(in_), writes(x), [&] { r.all_gather(r[in_], r[x]); });
}

void ColumnInput::reduce(Run& r) const {
  if (d_x.id != d_in_.id)
    r.reduce_scatter(r[d_x], r[d_in_]);
  else
    r.all_reduce(r[d_in_]);
}

RowOutput::RowOutput(const ModelLayout& layout, const AddSlot& add, Slot out, Slot d_out, int64_t hidden,
                     DType out_type, DType d_out_type)
    : partial(out), d_full(d_out), out_(out), d_out_(d_out) {
  if (!layout.sequence_parallel) return;
  partial = add({.name = "partial output", .width = hidden, .dtype = out_type});
  d_full = add({.name = "gathered d_out", .width = hidden, .dtype = d_out_type});
}

void RowOutput::reduce(Run& r) const {
  if (partial.id != out_.id)
    r.reduce_scatter(r[partial], r[out_]);
  else
    r.all_reduce(r[out_]);
}

void RowOutput::gather(Run& r) const {
  if (d_full.id != d_out_.id)
    r.dgrad("gather", reads(d_out_), writes(d_full), [&] { r.all_gather(r[d_out_], r[d_full]); });
}

Tensor RowOutput::bias(const Run& r, int parameter) {
  return r.layout().tensor_rank == 0 ? r.weight(parameter) : Tensor{};
}

}  // namespace nrl::model
