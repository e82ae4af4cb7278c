#include "apps/model/layers/activation.h"

#include "core/ops/kernel_table.h"

namespace nrl::model {

void Activation::compute(const Run& r, Slot to) const {
  ops::activation_forward(
      r.exec(), {.kind = kind, .gated = gated, .x = rows_of(r, in, groups), .out = rows_of(r, to, groups)});
}

void Activation::forward(Run& r) const {
  if (out && !fused) r.step(name, reads(in), writes(out), [&] { compute(r, out); });
}

void Activation::backward(Run& r) const {
  if (!d_in || fused) return;
  r.dgrad(name, reads(d_out, in),
          remakes ? writes(over(d_in, in), remade_over(out, d_out)) : writes(over(d_in, in)), [&] {
            ops::activation_backward(r.exec(), {.kind = kind,
                                                .gated = gated,
                                                .dout = rows_of(r, d_out, groups),
                                                .x = rows_of(r, in, groups),
                                                .dx = rows_of(r, d_in, groups),
                                                .out = remakes ? r.remade(out) : Tensor{}});
          });
}

}  // namespace nrl::model
