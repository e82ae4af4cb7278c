#include "apps/model/linear/linear.h"

#include "apps/model/spec/rank_groups.h"
#include "apps/model/spec/recompute_rule.h"
#include "core/ops/kernel_table.h"
#include "core/trace/trace.h"

namespace nrl::model {

using precision::Role;

namespace {

/// True if tensor-parallel ranks round their own rows of x (Split::outputs) or dy (Split::inputs) to FP8 and
/// gather the codes. Otherwise they gather the rows as they are, and an FP8 GEMM rounds all of them. The
/// numbers are the same.
bool gathers_codes(const LayerBuilder& b, const LinearSpec& spec) {
  // An adapter reads the rows themselves.
  if (spec.groups || spec.adapter || !b.layout.sequence_parallel) return false;
  // With scales of blocks the transposed copy has other blocks, so that both copies would be gathered: no
  // fewer bytes than bf16.
  const auto whole = [&](Role role) {
    return b.recipe.of(b.layer, spec.gemm, role).scaling == Scaling::tensor;
  };
  // Other ops that read x, and the gradient of a bias, read the rows themselves.
  return spec.split == Split::outputs ? whole(Role::input) && !spec.shares_x
                                      : whole(Role::gradient) && spec.bias < 0;
}

Adapter adapter_of(const LayerBuilder& b, const LinearSpec& spec) {
  const bool outputs = spec.split == Split::outputs;
  return {b,
          spec.name,
          spec.adapter,
          {.in = spec.in,
           .first_in = outputs ? 0 : spec.in * b.layout.tensor_rank,
           .all_in = outputs ? spec.in : spec.in * b.layout.tensor,
           .stream = static_cast<int>(spec.gemm),
           .rules = spec.rules}};
}

/// The forward pass of a step's first microbatch, since which no weight has changed.
bool begins_step(const Run& r) {
  return r.first_microbatch() && !r.recomputes();
}

constexpr std::string_view row_copy_text = " weight in FP8", column_copy_text = " weight transposed";

/// The ranks that have parts of a weight and agree on its scale.
std::optional<parallel::GroupId> ranks_of_weight_scale(const ModelLayout& layout, bool experts) {
  if (experts && exchanges_tokens(layout)) return expert_exchange_group;
  if (!experts && layout.tensor > 1) return parallel::group::tp;
  return std::nullopt;
}

}  // namespace

bool copies_weight(std::string_view step) {
  return step.ends_with(row_copy_text) || step.ends_with(column_copy_text);
}

Linear::Linear(const LayerBuilder& b, const LinearSpec& spec)
    : spec_(spec),
      trains_weight_(b.trains(spec.weight)),
      trains_bias_(b.trains(spec.bias)),
      layer_(b.layer),
      gathers_codes_(gathers_codes(b, spec)),
      fused_name_(trace::intern(fmt::format("{}_gelu", spec.name))),
      format_(b.recipe.of(b.layer, spec.gemm, Role::weight)),
      margin_(b.recipe.quantized().margin) {
  const bool outputs = spec.split == Split::outputs;
  if (outputs && !spec.groups && b.layout.sequence_parallel) {
    spec_.rules = gather_rule;
    gathers_rows_of_x_ = !gathers_codes_;
  }
  const CommOverlap overlap = overlap_of(b, spec.overlaps);
  const QuantizedSpec x{.gemm = spec.gemm,
                        .role = Role::input,
                        .width = spec.in,
                        .divided = !outputs,
                        .gathers = outputs && gathers_codes_,
                        .overlap = overlap,
                        .rules = spec_.rules,
                        .column = trains_weight_ && !spec.weighted,
                        .groups = spec.groups};
  input_ = QuantizedValue(b, x);
  if (spec.weighted && trains_weight_) {
    QuantizedSpec weighted = x;
    weighted.rules = "";
    weighted.row = false;
    weighted.column = true;
    weighted_ = QuantizedValue(b, weighted);
  }
  gradient_ = QuantizedValue(b, {.gemm = spec.gemm,
                                 .role = Role::gradient,
                                 .width = spec.out,
                                 .divided = outputs,
                                 .gathers = !outputs && gathers_codes_,
                                 .overlap = overlap,
                                 .column = trains_weight_,
                                 .groups = spec.groups});
  adapter_ = adapter_of(b, spec_);
  if (!input_ || b.recipe.caches_fp8(b.layer, spec.gemm)) return;
  const auto add = [&](const char*& step, std::string_view copy, int64_t rows, int64_t columns) {
    step = trace::intern(fmt::format("{}{}", name_of(spec.gemm), copy));
    return b.add({.name = step,
                  .width = quantized_bytes(format_.scaling, experts() * rows, columns),
                  .dtype = DType::u8,
                  .rows = one_row,
                  .rules = every_rule()});
  };
  if (!b.recipe.keeps_fp8(b.layer, spec.gemm)) rounded_ = add(round_, row_copy_text, spec.out, spec.in);
  transposed_ = add(transpose_, column_copy_text, spec.in, spec.out);
}

void Linear::connect(const LayerBuilder& b, const LinearEnds& ends) {
  ends_ = ends;
  if (spec_.groups) return;
  const bool outputs = spec_.split == Split::outputs;
  const QuantizedValue& arrives = outputs ? input_ : gradient_;
  const Boundary boundary{
      .codes = arrives.gathered(), .whole = arrives && !gathers_codes_, .overlaps = spec_.overlaps};
  if (outputs)
    column_.emplace(b, ends.x, ends.d_x, boundary);
  else
    row_.emplace(b, ends.y, ends.d_y, boundary);
}

bool Linear::computes_d_y(bool gated) const {
  return gradient_ && !adapter_ && spec_.bias < 0 &&
         (!gated || ops::halves_scales(gradient_.scaling(), spec_.out / 2));
}

Tensor Linear::input(const Run& r) const {
  return input_ ? input_.row(r) : rows_of(r, x(), spec_.groups);
}

Tensor Linear::gradient(const Run& r) const {
  return gradient_ ? gradient_.row(r) : rows_of(r, d_y(), spec_.groups);
}

void Linear::forward(Run& r, const Value& x) const {
  if (column_) column_->gather(r);
  if (input_) {
    Value all = x;
    if (all.slot.id == ends_.x.id) all.slot = this->x();
    input_.forward_steps(r, all);
  }
  if (rounded_)
    r.step(round_, reads(), writes(rounded_), [&] { quantize_weight(r, row_copy(r), {}, begins_step(r)); });
  const auto ready = [&] {
    if (column_) column_->wait(r);
  };
  if (adapter_) adapter_.drop(r, this->x(), ready);
  const LinearEnds::Fused& fused = ends_.y_of;
  const Slot y = row_ ? row_->partial : ends_.y;
  const Reads adapted = adapter_ ? adapter_.forward_reads(this->x()) : Reads{};
  r.step(fused.pre_activation ? fused_name_ : spec_.name,
         (input_ ? input_.row_reads() | reads(rounded_) : reads(this->x()) | groups()) | adapted,
         writes(y, ends_.y, fused.pre_activation, adapter_.u()), [&] {
           const Tensor in = input(r), w = weight(r), out = rows_of(r, y, spec_.groups);
           if (spec_.groups)
             return ops::grouped_linear_forward(
                 r.exec(), {.x = in, .weight = w, .offsets = spec_.groups->offsets_of(r), .out = out});
           const Tensor bias = row_ ? RowOutput::bias(r, spec_.bias) : r.weight(spec_.bias);
           const Tensor pre_activation = r[fused.pre_activation];
           const auto gemm = [&](const GemmRows& rows) {
             ops::linear_forward(r.exec(), {.x = rows.input(in),
                                            .weight = w,
                                            .bias = bias,
                                            .out = rows.output(out),
                                            .activation = fused.activation,
                                            .pre_activation = rows.output(pre_activation)});
             if (adapter_) adapter_.add(r, this->x(), out, rows);
           };
           if (row_)
             row_->multiply(r, gemm);
           else
             column_->multiply(r, in, gemm);
         });
  input_.forward_column_step(r);
}

void Linear::dgrad(Run& r, const Value& d_y, const MoreGradient& more) const {
  if (row_) row_->gather(r);
  if (column_ && (trains_weight_ || adapter_.keeps_x())) column_->gather_again(r);
  if (gradient_) {
    Value all = d_y;
    if (all.slot.id == ends_.d_y.id) all.slot = this->d_y();
    gradient_.backward_step(r, all);
  }
  if (transposed_)
    r.dgrad(transpose_, reads(), writes(transposed_), [&] {
      if (rounded_) return quantize_weight(r, {}, column_copy(r), false);
      ops::transpose(r.exec(), {.x = weight(r), .out = column_copy(r)});
    });
  const LinearEnds::Fused& fused = ends_.d_x_of;
  const Reads from =
      (gradient_ ? gradient_.row_reads() | reads(transposed_) : reads(this->d_y()) | groups()) |
      (adapter_ ? reads(this->d_y()) : Reads{});
  r.dgrad(fused.pre_activation ? fused_name_ : spec_.name, from | more.reads | reads(fused.pre_activation),
          writes(d_x(), ends_.d_x).with(adapter_.gradients()), [&] {
            const Tensor dout = gradient(r), w = weight_for_gradient(r), dx = rows_of(r, d_x(), spec_.groups);
            if (spec_.groups)
              return ops::grouped_linear_backward_data(
                  r.exec(), {.dout = dout, .weight = w, .offsets = spec_.groups->offsets_of(r), .dx = dx});
            const Tensor pre_activation = r[fused.pre_activation];
            const auto gemm = [&](const GemmRows& rows) {
              ops::linear_backward_data(r.exec(), {.dout = rows.input(dout),
                                                   .weight = w,
                                                   .dx = rows.output(dx),
                                                   .activation = fused.activation,
                                                   .pre_activation = rows.output(pre_activation)});
              if (adapter_) adapter_.add_gradient(r, r[this->d_y()], dx, rows);
            };
            if (row_) return row_->multiply_gradient(r, dout, gemm);
            gemm({.in = 0, .count = dout.dim(0), .out = 0});
            if (more.work) more.work();
            column_->reduce(r);
          });
  gradient_.backward_column_step(r);
}

void Linear::wgrad(Run& r) const {
  if (trains_weight_ || trains_bias_) base_wgrad(r);
  if (adapter_)
    adapter_.wgrad(r, x(), d_y(), [&] {
      if (column_) column_->wait(r);
    });
  if (column_) column_->finish_reduce(r);
}

void Linear::base_wgrad(Run& r) const {
  const Slot x = spec_.weighted ? ends_.weighted : this->x(), dy = d_y();
  if (weighted_) weighted_.backward_step(r, {x});
  const QuantizedValue& input = spec_.weighted ? weighted_ : input_;
  const int bias = trains_bias_ ? spec_.bias : -1;
  if (!trains_weight_)
    return r.wgrad(spec_.name, reads(dy), [&] {
      ops::column_sums(r.exec(), {.x = r[dy], .out = r.grad(bias), .accumulate = r.accumulates(bias)});
      r.gradient_ready({bias});
    });
  const Reads read = !input     ? reads(dy, x) | groups()
                     : bias < 0 ? input.column_reads() | gradient_.column_reads()
                                : input.column_reads() | gradient_.column_reads() | reads(dy);
  r.wgrad(spec_.name, read, [&] {
    if (column_) column_->wait(r);
    const bool accumulate = r.accumulates(spec_.weight);
    const Tensor dout = input ? gradient_.column(r) : rows_of(r, dy, spec_.groups),
                 in = input ? input.column(r) : rows_of(r, x, spec_.groups);
    if (spec_.groups) {
      ops::grouped_linear_backward_weight(r.exec(), {.dout = dout,
                                                     .x = in,
                                                     .offsets = spec_.groups->offsets_of(r),
                                                     .dweight = r.grad(spec_.weight),
                                                     .accumulate = accumulate});
    } else {
      if (input && bias >= 0)
        ops::column_sums(r.exec(), {.x = r[dy], .out = r.grad(bias), .accumulate = accumulate});
      ops::linear_backward_weight(r.exec(), {.dout = dout,
                                             .x = in,
                                             .dweight = r.grad(spec_.weight),
                                             .dbias = input ? Tensor{} : r.grad(bias),
                                             .accumulate = accumulate});
    }
    r.gradient_ready({spec_.weight, bias});
  });
}

int64_t Linear::experts() const {
  return spec_.groups ? spec_.groups->own_experts() : 1;
}

Tensor Linear::row_copy(const Run& r) const {
  return copy_in(r, rounded_, experts() * spec_.out, spec_.in);
}

Tensor Linear::column_copy(const Run& r) const {
  return copy_in(r, transposed_, experts() * spec_.in, spec_.out);
}

Tensor Linear::copy_in(const Run& r, Slot slot, int64_t rows, int64_t columns) const {
  const Tensor memory = r[slot];
  Tensor t = quantized_tensor(memory.data, format_, rows, columns, memory.device);
  if (format_.scaling == Scaling::tensor)
    t.scales.data = r.context().fp8->weight(spec_.weight).row.scales.data;
  return t;
}

Tensor Linear::weight(Run& r) const {
  if (!input_) return r.weight(spec_.weight);
  if (rounded_) return row_copy(r);
  const QuantizedWeight& w = r.context().fp8->weight(spec_.weight);
  if (transposed_)
    r.weight(spec_.weight);  // which may be gathered
  else if (begins_step(r))
    quantize_weight(r, w.row, w.column, true);
  return w.row;
}

Tensor Linear::weight_for_gradient(const Run& r) const {
  if (!gradient_) return r.weight(spec_.weight);
  return transposed_ ? column_copy(r) : r.context().fp8->weight(spec_.weight).column;
}

void Linear::quantize_weight(Run& r, Tensor row, Tensor column, bool scale) const {
  const QuantizedWeight& w = r.context().fp8->weight(spec_.weight);
  const Tensor weight = r.weight(spec_.weight);
  if (w.amax && scale) {
    ops::largest_magnitude(r.exec(), {.source = {weight}, .amax = w.amax});
    if (const auto ranks = ranks_of_weight_scale(r.layout(), spec_.groups != nullptr))
      r.all_reduce(w.amax, *ranks, comm::Reduce::max);
    ops::update_scales(r.exec(), {.amax = make_tensor(w.amax.data, DType::f32, {1, 1}, w.amax.device),
                                  .scale = make_tensor(row.scales.data, DType::f32, {1}, w.amax.device),
                                  .format = format_.dtype,
                                  .margin = margin_});
  } else if (format_.scaling == Scaling::tensor && scale && r.trains()) {
    const DelayedScales& s = r.context().fp8->delayed();
    row.scales.amax = column.scales.amax =
        s.amax.ptr<float>() + s.layout.index(layer_, spec_.gemm, Role::weight);
  }
  ops::quantize(r.exec(), {.source = {weight}, .row = row, .column = column, .parts = experts()});
}

}  // namespace nrl::model
