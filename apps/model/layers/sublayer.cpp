#include "apps/model/layers/sublayer.h"

#include "core/ops/kernel_table.h"

namespace nrl::model {
namespace {

Tensor flat(const Tensor& t) {
  return make_tensor(t.data, t.dtype, {t.numel()}, t.device);
}

}  // namespace

void Sublayer::add_output(const LayerBuilder& b, std::string_view name, std::string_view gradient, int norm) {
  out_ = b.activation(name, b.spec.hidden, sequence_rows);
  d_y_ = b.spec.residual_dropout > 0 ? b.gradient(gradient, b.spec.hidden, sequence_rows) : ends_.d_out;
  if (norm < 0) return;
  norm_weight_ = norm;
  normed_ = b.activation("normalized output", b.spec.hidden, sequence_rows);
  rstd_ = b.add({.name = "output norm statistics", .width = 1, .rows = sequence_rows});
  d_normed_ = d_y_;
  d_y_ = b.gradient("d_output", b.spec.hidden, sequence_rows);
}

void Sublayer::add_amax(const LayerBuilder& b, const Linear& last) {
  if (normed_ && last.measures(d_y_)) d_y_amax_ = b.number("d_output amax");
  if (!normed_ && last.measures(ends_.d_out))
    d_out_amax_ = b.number(ends_.port ? "d_out amax" : "d_residual amax", ends_.port);
}

void Sublayer::normalize_output(Run& r) const {
  if (!normed_) return;
  r.step("output_norm", reads(out_), writes(normed_, rstd_), [&] {
    ops::norm_forward(r.exec(), {.eps = spec_.norm_eps,
                                 .x = r[out_],
                                 .weight = r.weight(norm_weight_),
                                 .weight_offset = spec_.norm_offset,
                                 .out = r[normed_],
                                 .rstd = flat(r[rstd_])});
  });
}

Value Sublayer::output_gradient(Run& r, std::string_view step) const {
  const Slot d_out = ends_.d_out, d_end = normed_ ? d_normed_ : d_y_;
  if (d_end.id != d_out.id)
    r.dgrad(step, reads(d_out), writes(d_end),
            [&] { r.drop(r[d_out], {}, r[d_end], spec_.residual_dropout, layer_, site_); });
  if (!normed_) return {.slot = d_y_, .amax = d_out_amax_};
  r.dgrad("output_norm", reads(d_end, out_, rstd_), writes(d_y_, d_y_amax_), [&] {
    ops::norm_backward(r.exec(), {.dout = r[d_end],
                                  .x = r[out_],
                                  .weight = r.weight(norm_weight_),
                                  .weight_offset = spec_.norm_offset,
                                  .rstd = flat(r[rstd_]),
                                  .dx = r[d_y_],
                                  .amax = zero_amax(r, d_y_amax_),
                                  .dweight = r.grad(norm_weight_)});
    r.gradient_ready({norm_weight_});
  });
  return {.slot = d_y_, .amax = d_y_amax_};
}

}  // namespace nrl::model
