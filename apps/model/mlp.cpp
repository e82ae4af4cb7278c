#include "apps/model/sublayers.h"
#include "core/ops/kernel_table.h"
#include "core/ops/transfer.h"

namespace nrl::model {

using precision::Gemm;

PreNorm::PreNorm(const ModelSpec& m, const precision::Recipe& recipe, const AddSlot& add, Stream in,
                 int weight, int bias)
    : in_(in), weight_(weight), bias_(bias) {
  sum = add({.name = "residual",
             .width = m.hidden,
             .dtype = recipe.activations(),
             .rows = sequence_rows,
             .rules = "input"});
  stats_ = add(
      {.name = "norm statistics", .width = m.norm == ops::NormKind::layer ? 2 : 1, .rows = sequence_rows});
  out = add({.name = "norm",
             .width = m.hidden,
             .dtype = recipe.activations(),
             .rows = sequence_rows,
             .rules = "norm"});
}

PreNorm::Statistics PreNorm::statistics(const Run& r) const {
  const Tensor t = r[stats_];
  const int64_t n = t.dim(0);
  float* p = t.ptr<float>();
  if (t.dim(1) == 1) return {{}, make_tensor(p, DType::f32, {n})};
  return {make_tensor(p, DType::f32, {n}), make_tensor(p + n, DType::f32, {n})};
}

void PreNorm::forward(Run& r) {
  const ModelSpec& m = r.spec();
  const auto norm = [&](const Tensor& x, const Tensor& residual, const ops::FusedDropout& dropout) {
    const Statistics s = statistics(r);
    ops::norm_forward(r.exec(), {.kind = m.norm,
                                 .eps = m.norm_eps,
                                 .x = x,
                                 .residual = residual,
                                 .sum = residual ? r[sum] : Tensor{},
                                 .weight = r.weight(weight_),
                                 .bias = r.weight(bias_),
                                 .out = r[out],
                                 .mean = s.mean,
                                 .rstd = s.rstd,
                                 .dropout = dropout});
  };
  r.step("norm", reads(in_.x, in_.residual), writes(over(sum, in_.x), stats_, out), [&] {
    if (r[in_.residual]) {
      norm(r[in_.x], r[in_.residual], r.dropout(m.residual_dropout, in_.layer, in_.site));
      return;
    }
    if (r[sum].data != r[in_.x].data) ops::copy(r.exec(), r[in_.x], r[sum]);
    norm(r[sum], {}, {});
  });
  // Recomputed from the sum, which is always kept.
  r.step(memory::recompute, "norm", reads(sum), writes(stats_, out), [&] { norm(r[sum], {}, {}); });
}

void PreNorm::backward(Run& r, Slot d_out, Slot d_residual, Slot d_x) {
  r.dgrad("norm", reads(d_out, sum, stats_, d_residual), writes(over(d_x, d_residual ? d_residual : d_out)),
          [&] {
            const Statistics s = statistics(r);
            ops::norm_backward(r.exec(), {.kind = r.spec().norm,
                                          .dout = r[d_out],
                                          .x = r[sum],
                                          .weight = r.weight(weight_),
                                          .mean = s.mean,
                                          .rstd = s.rstd,
                                          .dresidual = r[d_residual],
                                          .dx = r[d_x],
                                          .dweight = r.grad(weight_),
                                          .dbias = r.grad(bias_)});
            r.gradient_ready({weight_, bias_});
          });
}

Mlp::Mlp(const ModelSpec& m, const ModelLayout& layout, const precision::Recipe& recipe, const AddSlot& add,
         int layer, const LayerParameters& p, Stream in, bool fuse_gelu, Slot d_out, Slot d_x)
    : spec_(m),
      p_(p),
      layer_(layer),
      fuse_gelu_(fuse_gelu && !recipe.quantizes(layer, Gemm::mlp_in) &&
                 !recipe.quantizes(layer, Gemm::mlp_out)),
      norm_(m, recipe, add, in, p.norm2, p.norm2_bias),
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
                .rules = layout.sequence_parallel ? gather_rule : "norm"}),
      out_proj_(recipe, add,
                {.layer = layer,
                 .gemm = Gemm::mlp_out,
                 .weight = p.mlp_out,
                 .bias = p.mlp_out_bias,
                 .in = m.ffn,
                 .out = m.hidden,
                 .rules = "activation mlp"}) {
  const DType dtype = recipe.activations(), gradients = recipe.gradients();
  in_ = add({.name = "mlp_in", .width = m.mlp_in_width(), .dtype = dtype, .rules = "mlp"});
  if (!out_proj_.quantizes_input())
    act_ = add({.name = "activation mlp", .width = m.ffn, .dtype = dtype, .rules = "activation mlp"});
  out_ = add({.name = "mlp_out", .width = m.hidden, .dtype = dtype, .rows = sequence_rows});
  if (m.residual_dropout > 0)
    d_proj_ = add({.name = "d_mlp_out", .width = m.hidden, .dtype = gradients, .rows = sequence_rows});
  if (!fuse_gelu_) d_act_ = add({.name = "d_activation", .width = m.ffn, .dtype = gradients});
  d_in_ = add({.name = "d_mlp_in", .width = m.mlp_in_width(), .dtype = gradients});
  d_norm_ = add({.name = "d_norm2", .width = m.hidden, .dtype = gradients, .rows = sequence_rows});
  input_.emplace(layout, layout.overlap, add, norm_.out, d_norm_, m.hidden, dtype, gradients);
  output_.emplace(layout, layout.overlap, add, out_, d_proj_ ? d_proj_ : d_out_, m.hidden, dtype, gradients);
}

void Mlp::forward(Run& r) {
  norm_.forward(r);
  input_->gather(r);
  in_proj_.quantize_input(r, {input_->x});
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
  out_proj_.quantize_gradient(r, d_proj);
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
  in_proj_.quantize_gradient(r, d_in_);
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
