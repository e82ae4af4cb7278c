#include "apps/model/linear/pre_norm.h"

#include "core/ops/kernel_table.h"
#include "core/ops/transfer.h"

namespace nrl::model {

Tensor zero_amax(const Run& r, Slot amax) {
  const Tensor slot = r[amax];
  if (!slot) return {};
  const Tensor number = make_tensor(slot.data, DType::f32, {1}, slot.device);
  ops::zero(r.exec(), {.x = number});
  return number;
}

PreNorm::PreNorm(const LayerBuilder& b, Stream in, int weight, int bias, bool stored)
    : in_(in), weight_(weight), bias_(bias) {
  const int64_t width = b.spec.hidden;
  sum = b.activation("residual", width, sequence_rows, "input");
  stats_ = b.add({.name = "norm statistics",
                  .width = b.spec.norm == ops::NormKind::layer ? 2 : 1,
                  .rows = sequence_rows});
  if (stored) out = b.activation("norm", width, sequence_rows, "norm");
}

PreNorm::Statistics PreNorm::statistics(const Run& r) const {
  const Tensor t = r[stats_];
  const int64_t n = t.dim(0);
  float* p = t.ptr<float>();
  if (t.dim(1) == 1) return {{}, make_tensor(p, DType::f32, {n})};
  return {make_tensor(p, DType::f32, {n}), make_tensor(p + n, DType::f32, {n})};
}

ops::QuantizeSource PreNorm::source(const Run& r) const {
  const Statistics s = statistics(r);
  return {.x = r[sum],
          .norm = {.weight = r.weight(weight_),
                   .weight_offset = r.spec().norm_offset,
                   .bias = r.weight(bias_),
                   .mean = s.mean,
                   .rstd = s.rstd}};
}

Value PreNorm::forward(Run& r, Slot amax) const {
  const ModelSpec& m = r.spec();
  if (out) amax = {};
  const auto norm = [&](const Tensor& x, const Tensor& residual, const ops::FusedDropout& dropout) {
    const Statistics s = statistics(r);
    // The forward pass has already found the amax of a recomputed tensor.
    const Tensor largest = r.recomputes() ? Tensor{} : zero_amax(r, amax);
    ops::norm_forward(r.exec(), {.kind = m.norm,
                                 .eps = m.norm_eps,
                                 .x = x,
                                 .residual = residual,
                                 .sum = residual ? r[sum] : Tensor{},
                                 .weight = r.weight(weight_),
                                 .weight_offset = m.norm_offset,
                                 .bias = r.weight(bias_),
                                 .out = r[out],
                                 .mean = s.mean,
                                 .rstd = s.rstd,
                                 .amax = largest,
                                 .dropout = dropout});
  };
  r.step("norm", reads(in_.x, in_.residual), writes(over(sum, in_.x), stats_, out, amax), [&] {
    if (r[in_.residual]) {
      norm(r[in_.x], r[in_.residual], r.dropout(m.residual_dropout, in_.layer, in_.site));
      return;
    }
    if (r[sum].data != r[in_.x].data) ops::copy(r.exec(), r[in_.x], r[sum]);
    norm(r[sum], {}, {});
  });
  // Recomputed from the sum, which is always kept.
  r.step(memory::recompute, "norm", reads(sum), writes(stats_, out), [&] { norm(r[sum], {}, {}); });
  return out ? Value{out} : Value{.norm = this};
}

void PreNorm::backward(Run& r, Slot d_out, Slot d_residual, StreamGradient d_x) const {
  r.dgrad("norm", reads(d_out, sum, stats_, d_residual),
          writes(over(d_x.slot, d_residual ? d_residual : d_out), d_x.amax), [&] {
            const Statistics s = statistics(r);
            ops::norm_backward(r.exec(), {.kind = r.spec().norm,
                                          .dout = r[d_out],
                                          .x = r[sum],
                                          .weight = r.weight(weight_),
                                          .weight_offset = r.spec().norm_offset,
                                          .mean = s.mean,
                                          .rstd = s.rstd,
                                          .dresidual = r[d_residual],
                                          .dx = r[d_x.slot],
                                          .amax = zero_amax(r, d_x.amax),
                                          .dweight = r.grad(weight_),
                                          .dbias = r.grad(bias_)});
            r.gradient_ready({weight_, bias_});
          });
}

}  // namespace nrl::model
