#include "apps/model/projection.h"

#include "core/ops/kernel_table.h"
#include "core/trace/trace.h"

namespace nrl::model {

using precision::Gemm;
using precision::Role;

namespace {

/// Bytes of a row of a copy's slot: codes and a share of the scales. Rows are multiples of
/// precision::row_unit(), so that the scales of both copies fit.
int64_t slot_width(Scaling scaling, int64_t columns) {
  const ScaleTile tile = scale_tile(scaling);
  if (!has_scale_blocks(scaling)) return columns;
  if (scaling == Scaling::block128) return columns + (columns + 127) / 128 * 4;
  // 4 bytes for 128 numbers.
  return columns + (columns + tile.columns - 1) / tile.columns * 4;
}

Tensor scale_of(const Tensor& both) {
  return make_tensor(both.data, DType::f32, {1}, both.device);
}

Tensor amax_of(const Tensor& both) {
  return make_tensor(both.ptr<float>() + 1, DType::f32, {1}, both.device);
}

}  // namespace

int64_t quantized_bytes(Scaling scaling, int64_t rows, int64_t columns) {
  return rows * columns + (has_scale_blocks(scaling) ? scale_matrix(scaling, rows, columns).bytes : 0);
}

Tensor quantized_tensor(void* data, const precision::Format& format, int64_t rows, int64_t columns,
                        Device device) {
  Tensor t = make_tensor(data, format.dtype, {rows, columns}, device);
  const ScaleMatrix steps = scale_matrix(format.scaling, rows, columns);
  t.scales = {.kind = format.scaling, .row_step = steps.row_step, .column_step = steps.column_step};
  if (has_scale_blocks(format.scaling)) t.scales.data = static_cast<char*>(data) + rows * columns;
  return t;
}

QuantizedOperand::QuantizedOperand(const precision::Recipe& recipe, const AddSlot& add, int layer, Gemm gemm,
                                   Role role, int64_t width, bool divided, std::string_view rules)
    : format_(recipe.of(layer, gemm, role)),
      layer_(layer),
      margin_(recipe.quantized().margin),
      gemm_(gemm),
      role_(role),
      delayed_(recipe.quantized().amax_history > 0),
      divided_(divided),
      width_(width) {
  if (format_.scaling == Scaling::none) return;
  const auto name = [&](const char* what) {
    return trace::intern(fmt::format("{} {} {}", name_of(gemm), name_of(role), what));
  };
  step_ = name("to FP8");
  const int64_t bytes = slot_width(format_.scaling, width);
  row_ = add({.name = name("FP8"), .width = bytes, .dtype = DType::u8});
  column_ = add({.name = name("FP8 transposed"), .width = bytes, .dtype = DType::u8, .rules = rules});
  if (format_.scaling == Scaling::tensor && !delayed_)
    scale_ = add({.name = name("scale"), .width = 2, .rows = one_row});
}

Tensor QuantizedOperand::with_scales(const Run& r, Tensor t) const {
  if (format_.scaling != Scaling::tensor) return t;
  if (scale_) {
    t.scales.data = r[scale_].data;
    return t;
  }
  const DelayedScales& s = r.context().scales;
  const int index = s.layout.index(layer_, gemm_, role_);
  t.scales.data = s.scale.ptr<float>() + index;
  // Evaluation leaves the state of training alone; what is recomputed has been measured.
  if (r.trains()) t.scales.amax = s.amax.ptr<float>() + index;
  return t;
}

Tensor QuantizedOperand::row(const Run& r) const {
  const Tensor t = r[row_];
  return with_scales(r, quantized_tensor(t.data, format_, t.dim(0), width_, t.device));
}

Tensor QuantizedOperand::column(const Run& r) const {
  const Tensor t = r[column_];
  return with_scales(r, quantized_tensor(t.data, format_, width_, t.dim(0), t.device));
}

ops::QuantizeSource QuantizedOperand::source_of(const Run& r, const Source& s) {
  return {.x = r[s.slot], .activation = s.activation, .gated = s.gated};
}

void QuantizedOperand::measure(Run& r, const Source& source) const {
  if (!scale_) return;
  const Tensor both = r[scale_], amax = amax_of(both);
  ops::zero(r.exec(), {.x = amax});
  ops::largest_magnitude(r.exec(), {.source = source_of(r, source), .amax = amax});
  const ModelLayout& layout = r.layout();
  if (layout.context > 1 || (layout.tensor > 1 && divided_))
    r.all_reduce(amax, microbatch_ranks(layout.tensor, layout.context), comm::Reduce::max);
  ops::update_scales(r.exec(), {.amax = make_tensor(amax.data, DType::f32, {1, 1}, amax.device),
                                .scale = scale_of(both),
                                .format = format_.dtype,
                                .margin = margin_});
}

void QuantizedOperand::quantize(Run& r, const Source& source, bool with_row, bool with_column) const {
  ops::quantize(r.exec(), {.source = source_of(r, source),
                           .row = with_row ? row(r) : Tensor{},
                           .column = with_column ? column(r) : Tensor{}});
}

void QuantizedOperand::forward_steps(Run& r, const Source& source) const {
  r.step(memory::training, step_, reads(source.slot), writes(row_, column_, scale_), [&] {
    measure(r, source);
    quantize(r, source, true, true);
  });
  r.step(memory::evaluation | memory::generation, step_, reads(source.slot), writes(row_, scale_), [&] {
    measure(r, source);
    quantize(r, source, true, false);
  });
  // A step each, so that only what is read is recomputed.
  r.step(memory::recompute, step_, reads(source.slot, scale_), writes(row_),
         [&] { quantize(r, source, true, false); });
  r.step(memory::recompute, step_, reads(source.slot, scale_), writes(column_),
         [&] { quantize(r, source, false, true); });
}

void QuantizedOperand::backward_step(Run& r, const Source& source) const {
  r.dgrad(step_, reads(source.slot), writes(row_, column_, scale_), [&] {
    measure(r, source);
    quantize(r, source, true, true);
  });
}

Projection::Projection(const precision::Recipe& recipe, const AddSlot& add, int layer, Gemm gemm, int weight,
                       int bias, int64_t in, int64_t out, bool column, std::string_view rules)
    : layer_(layer),
      gemm_(gemm),
      format_(recipe.of(layer, gemm, Role::weight)),
      margin_(recipe.quantized().margin),
      weight_(weight),
      bias_(bias),
      in_(in),
      out_(out),
      input_(recipe, add, layer, gemm, Role::input, in, !column, rules),
      gradient_(recipe, add, layer, gemm, Role::gradient, out, column, "") {
  if (!recipe.keeps_fp8(layer, gemm)) return;
  transpose_ = trace::intern(fmt::format("{} weight transposed", name_of(gemm)));
  transposed_ = add({.name = transpose_, .width = in * out, .dtype = DType::u8, .rows = one_row});
}

void Projection::quantize_input(Run& r, const Source& x) const {
  if (input_) input_.forward_steps(r, x);
}

void Projection::quantize_gradient(Run& r, Slot dy) const {
  if (gradient_) gradient_.backward_step(r, {dy});
  if (transposed_)
    r.dgrad(transpose_, reads(), writes(transposed_),
            [&] { ops::transpose(r.exec(), {.x = weight(r), .out = weight_for_gradient(r)}); });
}

Tensor Projection::weight(Run& r) const {
  if (!input_) return r.weight(weight_);
  if (transposed_)
    r.weight(weight_);  // which may be gathered
  else if (r.first_microbatch() && !r.recomputes())
    quantize_weight(r);
  return r.context().quantized[static_cast<size_t>(weight_)].row;
}

Tensor Projection::weight_for_gradient(const Run& r) const {
  if (!gradient_) return r.weight(weight_);
  const QuantizedWeight& w = r.context().quantized[static_cast<size_t>(weight_)];
  if (!transposed_) return w.column;
  Tensor t = make_tensor(r[transposed_].data, w.row.dtype, {in_, out_}, w.row.device);
  t.scales = w.row.scales;
  return t;
}

void Projection::quantize_weight(Run& r) const {
  const QuantizedWeight& w = r.context().quantized[static_cast<size_t>(weight_)];
  const Tensor weight = r.weight(weight_);
  Tensor row = w.row, column = w.column;
  if (w.amax) {
    ops::largest_magnitude(r.exec(), {.source = {weight}, .amax = w.amax});
    if (r.layout().tensor > 1) r.all_reduce(w.amax, parallel::group::tp, comm::Reduce::max);
    ops::update_scales(r.exec(), {.amax = make_tensor(w.amax.data, DType::f32, {1, 1}, w.amax.device),
                                  .scale = make_tensor(row.scales.data, DType::f32, {1}, w.amax.device),
                                  .format = format_.dtype,
                                  .margin = margin_});
  } else if (format_.scaling == Scaling::tensor && r.trains()) {
    const DelayedScales& s = r.context().scales;
    row.scales.amax = column.scales.amax = s.amax.ptr<float>() + s.layout.index(layer_, gemm_, Role::weight);
  }
  ops::quantize(r.exec(), {.source = {weight}, .row = row, .column = column});
}

void Projection::wgrad(Run& r, std::string_view name, Slot dy, Slot x,
                       const std::function<void()>& before) const {
  const Reads read = !input_     ? reads(dy, x)
                     : bias_ < 0 ? input_.column_reads() | gradient_.column_reads()
                                 : input_.column_reads() | gradient_.column_reads() | reads(dy);
  r.wgrad(name, read, [&] {
    if (before) before();
    const bool accumulate = r.accumulates(weight_);
    if (input_ && bias_ >= 0)
      ops::column_sums(r.exec(), {.x = r[dy], .out = r.grad(bias_), .accumulate = accumulate});
    ops::linear_backward_weight(r.exec(), {.dout = input_ ? gradient_.column(r) : r[dy],
                                           .x = input_ ? input_.column(r) : r[x],
                                           .dweight = r.grad(weight_),
                                           .dbias = input_ ? Tensor{} : r.grad(bias_),
                                           .accumulate = accumulate});
    r.gradient_ready({weight_, bias_});
  });
}

}  // namespace nrl::model
