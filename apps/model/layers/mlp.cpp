#include "apps/model/layers/sublayers.h"
#include "core/ops/kernel_table.h"

namespace nrl::model {

using precision::Gemm;

Mlp::Mlp(const ModelSpec& m, const ModelLayout& layout, const precision::Recipe& recipe, const AddSlot& add,
         int layer, const LayerParameters& p, Stream in, bool fuse_gelu, Slot d_out, StreamGradient d_x)
    : spec_(m),
      p_(p),
      layer_(layer),
      fuse_gelu_(fuse_gelu && !recipe.quantizes(layer, Gemm::mlp_in) &&
                 !recipe.quantizes(layer, Gemm::mlp_out)),
      norm_(m, recipe, add, in, p.norm2, p.norm2_bias, stores_norm(m, layout, recipe, layer, Gemm::mlp_in)),
      d_out_(d_out),
      d_x_(d_x),
      in_proj_(recipe, add,
               {.layer = layer,
                .gemm = Gemm::mlp_in,
                .weight = p.mlp_in,
                .bias = p.mlp_in_bias,
                .in = m.hidden,
                .out = m.mlp_in_width(),
                .column = true,
                .gathers = gathers_fp8(m, layout, recipe, layer, Gemm::mlp_in),
                .rules = layout.sequence_parallel ? gather_rule : "norm"}),
      out_proj_(recipe, add,
                {.layer = layer,
                 .gemm = Gemm::mlp_out,
                 .weight = p.mlp_out,
                 .bias = p.mlp_out_bias,
                 .in = m.ffn,
                 .out = m.hidden,
                 .gathers = gathers_fp8(m, layout, recipe, layer, Gemm::mlp_out),
                 .rules = "activation mlp"}) {
  const DType dtype = recipe.activations(), gradients = recipe.gradients();
  in_ = add({.name = "mlp_in", .width = m.mlp_in_width(), .dtype = dtype, .rules = "mlp"});
  if (!out_proj_.quantizes_input())
    act_ = add({.name = "activation mlp", .width = m.ffn, .dtype = dtype, .rules = "activation mlp"});
  out_ = add({.name = "mlp_out", .width = m.hidden, .dtype = dtype, .rows = sequence_rows});
  if (m.residual_dropout > 0)
    d_proj_ = add({.name = "d_mlp_out", .width = m.hidden, .dtype = gradients, .rows = sequence_rows});
  if (!fuse_gelu_) d_act_ = add({.name = "d_activation", .width = m.ffn, .dtype = gradients});
  if (!in_proj_.computes_gradient(m.gated))
    d_in_ = add({.name = "d_mlp_in", .width = m.mlp_in_width(), .dtype = gradients});
  d_norm_ = add({.name = "d_norm2", .width = m.hidden, .dtype = gradients, .rows = sequence_rows});
  input_.emplace(layout, layout.overlap, add, norm_.out, d_norm_, m.hidden, dtype, gradients,
                 in_proj_.gathers());
  output_.emplace(layout, layout.overlap, add, out_, d_proj_ ? d_proj_ : d_out_, m.hidden, dtype, gradients,
                  out_proj_.gathers());
  d_out_amax_ = largest_gradient(add, out_proj_, *output_, d_out_, true);
}

void Mlp::forward(Run& r) {
  norm_.forward(r, in_proj_.input_amax());
  input_->gather(r);
  in_proj_.quantize_input(r, source_of(norm_, input_->x));
  const auto first = [&](const Tensor& out, ops::Activation activation, const Tensor& pre_activation) {
    input_->multiply(r, in_proj_.input(r, input_->x), [&](const GemmRows& rows) {
      ops::linear_forward(r.exec(), {.x = rows.input(in_proj_.input(r, input_->x)),
                                     .weight = in_proj_.weight(r),
                                     .bias = r.weight(p_.mlp_in_bias),
                                     .out = rows.output(out),
                                     .activation = activation,
                                     .pre_activation = rows.output(pre_activation)});
    });
  };
  if (fuse_gelu_) {
    r.step("mlp_in_gelu", reads(input_->x), writes(in_, act_),
           [&] { first(r[act_], spec_.activation, r[in_]); });
  } else {
    r.step("mlp_in", in_proj_.input_reads(input_->x), writes(in_),
           [&] { first(r[in_], ops::Activation::none, {}); });
    if (act_)
      r.step("activation", reads(in_), writes(act_), [&] {
        ops::activation_forward(
            r.exec(), {.kind = spec_.activation, .gated = spec_.gated, .x = r[in_], .out = r[act_]});
      });
  }
  out_proj_.quantize_input(r, {in_, spec_.activation, spec_.gated});
  r.step("mlp_out", out_proj_.input_reads(act_), writes(output_->partial, out_), [&] {
    output_->multiply(r, [&](const GemmRows& rows) {
      ops::linear_forward(r.exec(), {.x = rows.input(out_proj_.input(r, act_)),
                                     .weight = out_proj_.weight(r),
                                     .bias = RowOutput::bias(r, p_.mlp_out_bias),
                                     .out = rows.output(r[output_->partial])});
    });
  });
}

void Mlp::backward(Run& r) {
  const Slot d_proj = output_->d_full;
  if (d_proj_)
    r.dgrad("mlp_dropout", reads(d_out_), writes(d_proj_),
            [&] { r.drop(r[d_out_], {}, r[d_proj_], spec_.residual_dropout, layer_, DropoutSite::mlp); });
  output_->gather(r);
  out_proj_.quantize_gradient(r, {.slot = d_proj, .amax = d_out_amax_});
  if (fuse_gelu_) {
    r.dgrad("mlp_out_gelu", reads(d_proj, in_), writes(d_in_), [&] {
      output_->multiply_gradient(r, r[d_proj], [&](const GemmRows& rows) {
        ops::linear_backward_data(r.exec(), {.dout = rows.input(r[d_proj]),
                                             .weight = r.weight(p_.mlp_out),
                                             .dx = rows.output(r[d_in_]),
                                             .activation = spec_.activation,
                                             .pre_activation = rows.output(r[in_])});
      });
    });
  } else {
    r.dgrad("mlp_out", out_proj_.gradient_reads(d_proj), writes(d_act_), [&] {
      output_->multiply_gradient(r, out_proj_.gradient(r, d_proj), [&](const GemmRows& rows) {
        ops::linear_backward_data(r.exec(), {.dout = rows.input(out_proj_.gradient(r, d_proj)),
                                             .weight = out_proj_.weight_for_gradient(r),
                                             .dx = rows.output(r[d_act_])});
      });
    });
    // Before the activation, whose gradient may take the memory of its input.
    if (!act_) out_proj_.wgrad(r, "mlp_out", d_proj, act_);
    if (d_in_)
      r.dgrad("activation", reads(d_act_, in_), writes(over(d_in_, in_), remade_over(act_, d_act_)), [&] {
        ops::activation_backward(r.exec(), {.kind = spec_.activation,
                                            .gated = spec_.gated,
                                            .dout = r[d_act_],
                                            .x = r[in_],
                                            .dx = r[d_in_],
                                            .out = r.remade(act_)});
      });
  }
  // After the activation, which writes act_ where it is recomputed.
  if (act_) out_proj_.wgrad(r, "mlp_out", d_proj, act_);
  input_->gather_again(r);
  in_proj_.quantize_gradient(r, stored_or(d_in_, {in_, spec_.activation, spec_.gated, d_act_}));
  r.dgrad("mlp_in", in_proj_.gradient_reads(d_in_), writes(input_->d_x, d_norm_), [&] {
    ops::linear_backward_data(r.exec(), {.dout = in_proj_.gradient(r, d_in_),
                                         .weight = in_proj_.weight_for_gradient(r),
                                         .dx = r[input_->d_x]});
    input_->reduce(r);
  });
  in_proj_.wgrad(r, "mlp_in", d_in_, input_->x, [&] { input_->wait(r); });
  input_->finish_reduce(r);
  norm_.backward(r, d_norm_, d_out_, d_x_);
}

}  // namespace nrl::model
