#include "apps/model/linear/adapter.h"

#include "core/ops/kernel_table.h"
#include "core/trace/trace.h"

namespace nrl::model {

Adapter::Adapter(const LayerBuilder& b, const char* name, const AdapterParameters& parameters,
                 const Shape& shape)
    : parameters_(parameters), shape_(shape), layer_(b.layer) {
  if (!parameters_) return;
  const AdapterSpec& spec = b.spec.trained.adapters;
  rank_ = spec.rank;
  scale_ = spec.scale();
  dropout_ = spec.dropout;
  name_ = trace::intern(fmt::format("{}_lora", name));
  drop_name_ = trace::intern(fmt::format("{}_lora_dropout", name));
  const int64_t width = parameters_.modules * rank_;
  u_ = b.activation(trace::intern(fmt::format("{} lora", name)), width, token_rows);
  d_u_ = b.gradient(trace::intern(fmt::format("d_{} lora", name)), width, token_rows);
  if (dropout_ == 0) return;
  dropped_ = b.activation(drop_name_, shape_.in, token_rows, shape_.rules);
  d_dropped_ = b.gradient(trace::intern(fmt::format("d_{}", drop_name_)), shape_.in, token_rows);
}

template <class F>
void Adapter::for_each_piece(const Tensor& b, F&& work) const {
  int64_t row = 0;
  for (const AdapterParameters::Piece& piece : parameters_.all_pieces()) {
    work(piece, b.rows(row, piece.count));
    row += piece.count;
  }
}

void Adapter::apply_dropout(const Run& r, const Tensor& x, const Tensor& residual, const Tensor& out,
                            int64_t first_row) const {
  const ops::FusedDropout d = r.adapter_dropout(dropout_, layer_, shape_.stream);
  ops::dropout(r.exec(), {.x = x,
                          .residual = residual,
                          .out = out,
                          .p = d.p,
                          .seed = d.seed,
                          .stream = d.stream,
                          .first_row = d.first_row + (d.rows ? 0 : first_row),
                          .step = d.step,
                          .rows = d.rows ? d.rows.rows(first_row, x.dim(0)) : Tensor{},
                          .width = shape_.all_in,
                          .first_column = shape_.first_in});
}

void Adapter::drop(Run& r, Slot x, const std::function<void()>& ready) const {
  if (!dropped_) return;
  r.step(drop_name_, reads(x), writes(dropped_), [&] {
    ready();
    apply_dropout(r, r[x], {}, r[dropped_], 0);
  });
}

void Adapter::add(const Run& r, Slot x, const Tensor& y, const GemmRows& rows) const {
  if (!r.context().adapters) return;
  const Tensor in = rows.input(r[dropped_ ? dropped_ : x]), u = rows.input(r[u_]), out = rows.output(y);
  ops::linear_forward(r.exec(), {.x = in, .weight = r.weight(parameters_.a), .out = u, .scale = scale_});
  for_each_piece(r.weight(parameters_.b), [&](const AdapterParameters::Piece& piece, const Tensor& b) {
    ops::linear_forward(r.exec(), {.x = of_module(u, piece.module),
                                   .weight = b,
                                   .out = out.columns(piece.column, piece.count),
                                   .accumulate = true});
  });
}

void Adapter::add_gradient(const Run& r, const Tensor& dy, const Tensor& dx, const GemmRows& rows) const {
  const Tensor dout = rows.input(dy), d_u = rows.input(r[d_u_]), out = rows.output(dx);
  for_each_piece(r.weight(parameters_.b), [&](const AdapterParameters::Piece& piece, const Tensor& b) {
    ops::linear_backward_data(r.exec(), {.dout = dout.columns(piece.column, piece.count),
                                         .weight = b,
                                         .dx = of_module(d_u, piece.module),
                                         .scale = scale_});
  });
  const Tensor a = r.weight(parameters_.a);
  if (!d_dropped_)
    return ops::linear_backward_data(r.exec(), {.dout = d_u, .weight = a, .dx = out, .accumulate = true});
  const Tensor d_dropped = rows.input(r[d_dropped_]);
  ops::linear_backward_data(r.exec(), {.dout = d_u, .weight = a, .dx = d_dropped});
  apply_dropout(r, d_dropped, out, out, rows.in);
}

void Adapter::wgrad(Run& r, Slot x, Slot dy, const std::function<void()>& ready) const {
  const Slot in = dropped_ ? dropped_ : x;
  r.wgrad(name_, reads(in, dy, u_, d_u_), [&] {
    const auto [a, b] = std::pair(parameters_.a, parameters_.b);
    const Tensor dout = r[dy], u = r[u_];
    for_each_piece(r.grad(b), [&](const AdapterParameters::Piece& piece, const Tensor& d_b) {
      ops::linear_backward_weight(r.exec(), {.dout = dout.columns(piece.column, piece.count),
                                             .x = of_module(u, piece.module),
                                             .dweight = d_b,
                                             .accumulate = r.accumulates(b)});
    });
    ready();
    ops::linear_backward_weight(
        r.exec(), {.dout = r[d_u_], .x = r[in], .dweight = r.grad(a), .accumulate = r.accumulates(a)});
    r.gradient_ready({a, b});
  });
}

}  // namespace nrl::model
