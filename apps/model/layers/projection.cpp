#include "apps/model/layers/projection.h"

#include "core/ops/kernel_table.h"
#include "core/ops/transfer.h"
#include "core/trace/trace.h"

namespace nrl::model {

using precision::Gemm;
using precision::Role;

namespace {

/// Bytes of a row of a copy's slot: codes and a share of the scales. Rows are multiples of
/// row_unit(), so that the scales of both copies fit.
int64_t slot_width(Scaling scaling, int64_t columns) {
  const ScaleTile tile = scale_tile(scaling);
  if (!has_scale_blocks(scaling)) return columns;
  if (scaling == Scaling::block128) return columns + (columns + 127) / 128 * 4;
  // 4 bytes for 128 numbers.
  return columns + (columns + tile.columns - 1) / tile.columns * 4;
}

/// A slot of one number.
Tensor number(const Tensor& slot) {
  return make_tensor(slot.data, DType::f32, {1}, slot.device);
}

}  // namespace

std::array<std::optional<parallel::GroupId>, 2> ranks_of_scale(const ModelLayout& layout, bool parts,
                                                               bool experts) {
  const int of_microbatch = layout.tensor * layout.context, of_experts = layout.expert_ranks();
  std::array<std::optional<parallel::GroupId>, 2> out;
  if (experts ? of_microbatch > 1 : layout.context > 1 || (layout.tensor > 1 && parts))
    out[0] = microbatch_ranks(layout.tensor, layout.context);
  // Neighboring ranks exchange tokens: if their number divides the first group, it contains them.
  if (experts && of_experts > 1 && of_microbatch % of_experts != 0) out[1] = expert_exchange_group;
  return out;
}

std::optional<parallel::GroupId> ranks_of_weight_scale(const ModelLayout& layout, bool experts) {
  if (experts && exchanges_tokens(layout)) return expert_exchange_group;
  if (!experts && layout.tensor > 1) return parallel::group::tp;
  return std::nullopt;
}

Slot largest_gradient(const AddSlot& add, const Projection& projection, const RowOutput& output, Slot d_out,
                      bool port) {
  if (!projection.gradient_amax() || output.d_full.id != d_out.id) return {};
  return add({.name = port ? "d_out amax" : "d_residual amax", .width = 1, .rows = one_row, .port = port});
}

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

QuantizedOperand::QuantizedOperand(const precision::Recipe& recipe, const AddSlot& add,
                                   const OperandSpec& operand)
    : spec_(operand),
      format_(recipe.of(operand.layer, operand.gemm, operand.role)),
      margin_(recipe.quantized().margin),
      delayed_(recipe.quantized().amax_history > 0) {
  if (format_.scaling == Scaling::none) return;
  const auto name = [&](const char* what) {
    return trace::intern(fmt::format("{} {}{} {}", name_of(operand.gemm), operand.row ? "" : "weighted ",
                                     name_of(operand.role), what));
  };
  step_ = operand.gathers ? "gather" : name("to FP8");
  column_step_ = operand.gathers ? name("FP8 transposed") : step_;
  const int64_t bytes = slot_width(format_.scaling, operand.width);
  const RowDomain rows = !operand.experts                  ? token_rows
                         : row_unit(format_.scaling) == 16 ? dispatched_rows_by_16
                                                           : dispatched_rows_by_128;
  if (operand.row)
    row_ = add({.name = name("FP8"),
                .width = bytes,
                .dtype = DType::u8,
                .rows = rows,
                .rules = operand.gathers ? operand.rules : operand.row_rules});
  if (operand.column)
    column_ = add({.name = name("FP8 transposed"),
                   .width = bytes,
                   .dtype = DType::u8,
                   .rows = rows,
                   .rules = operand.rules});
  if (format_.scaling != Scaling::tensor || delayed_) return;
  scale_ = add({.name = name("scale"), .width = 1, .rows = one_row});
  amax_ = add({.name = name("amax"), .width = 1, .rows = one_row});
}

Tensor QuantizedOperand::with_scales(const Run& r, Tensor t) const {
  if (format_.scaling != Scaling::tensor) return t;
  if (scale_) {
    t.scales.data = r[scale_].data;
    return t;
  }
  const DelayedScales& s = r.context().scales;
  const int index = s.layout.index(spec_.layer, spec_.gemm, spec_.role);
  t.scales.data = s.aligned.rows(index, 1).data;
  // Evaluation must not change the state of training; the amax of a recomputed tensor is already known.
  if (r.trains()) t.scales.amax = s.amax.ptr<float>() + index;
  return t;
}

Tensor QuantizedOperand::row(const Run& r) const {
  const Tensor t = r[row_];
  return with_scales(r, quantized_tensor(t.data, format_, t.dim(0), spec_.width, t.device));
}

Tensor QuantizedOperand::column(const Run& r) const {
  const Tensor t = r[column_];
  return with_scales(r, quantized_tensor(t.data, format_, spec_.width, t.dim(0), t.device));
}

ops::QuantizeSource QuantizedOperand::values_of(const Run& r, const Source& s) const {
  if (s.norm) return s.norm->source(r);
  const auto rows = [&](Slot slot) { return spec_.experts ? spec_.experts->rows(r, slot) : r[slot]; };
  const Tensor x = rows(s.slot);
  return {.x = s.columns > 0 ? x.columns(s.column, s.columns) : x,
          .activation = s.activation,
          .gated = s.gated,
          .dout = s.d_out ? rows(s.d_out) : Tensor{}};
}

Tensor QuantizedOperand::offsets_of(const Run& r) const {
  return spec_.experts ? spec_.experts->offsets_of(r) : Tensor{};
}

Reads QuantizedOperand::group_reads() const {
  return spec_.experts ? reads(spec_.experts->offsets) : Reads{};
}

Reads QuantizedOperand::reads_of(const Source& source) const {
  return (source.norm ? source.norm->reads_of_source() : reads(source.slot, source.d_out, source.amax)) |
         group_reads();
}

Tensor QuantizedOperand::measure(Run& r, const Source& source) const {
  if (!scale_) return {};
  const auto ranks = ranks_of_scale(r.layout(), spec_.divided || spec_.gathers, spec_.experts != nullptr);
  const bool alone = !ranks[0] && !ranks[1];
  const Tensor given = r[source.amax];
  if (given && alone) return number(given);
  const Tensor amax = number(r[amax_]);
  if (given)
    ops::copy(r.exec(), given, r[amax_]);
  else if (!source.norm)
    ops::largest_magnitude(
        r.exec(), {.source = values_of(r, source), .amax = zero_amax(r, amax_), .offsets = offsets_of(r)});
  for (const auto& group : ranks)
    if (group) r.all_reduce(amax, *group, comm::Reduce::max);
  return amax;
}

void QuantizedOperand::quantize(Run& r, const Source& source, bool with_row, bool with_column,
                                const Tensor& measured) const {
  if (spec_.gathers) {
    if (with_row) gather(r, source, measured);
    if (with_column && column_) ops::transpose(r.exec(), {.x = row(r), .out = column(r)});
    return;
  }
  ops::quantize(r.exec(), {.source = values_of(r, source),
                           .row = with_row && row_ ? row(r) : Tensor{},
                           .column = with_column && column_ ? column(r) : Tensor{},
                           .offsets = offsets_of(r),
                           .measured = measured,
                           .margin = margin_});
}

void QuantizedOperand::gather(Run& r, const Source& source, const Tensor& measured) const {
  const ModelLayout& layout = r.layout();
  const Tensor codes = r[row_];
  const int64_t n = codes.dim(0) / layout.tensor, first = n * layout.tensor_rank;
  ops::quantize(r.exec(), {.source = values_of(r, source),
                           .row = row(r).rows(first, n),
                           .measured = measured,
                           .margin = margin_});
  r.all_gather_async(codes.rows(first, n), codes).wait();
}

void QuantizedOperand::forward_steps(Run& r, const Source& source) const {
  const Reads from = reads_of(source), measured = source.norm ? from | reads(amax_) : from;
  r.step(memory::training, step_, measured, writes(row_, column_, scale_, amax_),
         [&] { quantize(r, source, true, true, measure(r, source)); });
  const auto inference = memory::evaluation | (spec_.generation ? memory::generation : 0);
  r.step(inference, step_, measured, writes(row_, scale_, amax_),
         [&] { quantize(r, source, true, false, measure(r, source)); });
  // Each copy has its own step, so that only the copies that are read are recomputed.
  r.step(memory::recompute, step_, from | reads(scale_), writes(row_),
         [&] { quantize(r, source, true, false); });
  if (column_)
    r.step(memory::recompute, column_step_, spec_.gathers ? row_reads() : from | reads(scale_),
           writes(column_), [&] { quantize(r, source, false, true); });
}

void QuantizedOperand::backward_step(Run& r, const Source& source) const {
  r.dgrad(step_, reads_of(source), writes(row_, column_, scale_, amax_),
          [&] { quantize(r, source, true, true, measure(r, source)); });
}

Projection::Projection(const precision::Recipe& recipe, const AddSlot& add, const ProjectionSpec& spec)
    : spec_(spec),
      format_(recipe.of(spec.layer, spec.gemm, Role::weight)),
      margin_(recipe.quantized().margin) {
  NRL_CHECK(!spec.gathers || spec.column || spec.bias < 0, "the gradient of a bias is a sum of all rows");
  const OperandSpec x{.layer = spec.layer,
                      .gemm = spec.gemm,
                      .role = Role::input,
                      .width = spec.in,
                      .divided = !spec.column,
                      .gathers = spec.column && spec.gathers,
                      .rules = spec.rules,
                      .column = !spec.weighted,
                      .experts = spec.experts};
  input_ = QuantizedOperand(recipe, add, x);
  if (spec.weighted) {
    OperandSpec weighted = x;
    weighted.rules = "";
    weighted.row = false;
    weighted.column = true;
    weighted_ = QuantizedOperand(recipe, add, weighted);
  }
  gradient_ = QuantizedOperand(recipe, add,
                               {.layer = spec.layer,
                                .gemm = spec.gemm,
                                .role = Role::gradient,
                                .width = spec.out,
                                .divided = spec.column,
                                .gathers = !spec.column && spec.gathers,
                                .experts = spec.experts});
  if (!recipe.keeps_fp8(spec.layer, spec.gemm)) return;
  transpose_ = trace::intern(fmt::format("{} weight transposed", name_of(spec.gemm)));
  transposed_ = add({.name = transpose_,
                     .width = quantized_bytes(format_.scaling, spec.in, spec.out),
                     .dtype = DType::u8,
                     .rows = one_row});
}

Reads Projection::groups() const {
  return spec_.experts ? reads(spec_.experts->offsets) : Reads{};
}

Tensor Projection::rows(const Run& r, Slot slot) const {
  return spec_.experts ? spec_.experts->rows(r, slot) : r[slot];
}

void Projection::quantize_input(Run& r, const Source& x) const {
  if (input_) input_.forward_steps(r, x);
}

void Projection::quantize_gradient(Run& r, const Source& dy) const {
  if (gradient_) gradient_.backward_step(r, dy);
  if (transposed_)
    r.dgrad(transpose_, reads(), writes(transposed_),
            [&] { ops::transpose(r.exec(), {.x = weight(r), .out = weight_for_gradient(r)}); });
}

void Projection::quantize_weighted(Run& r, Slot x) const {
  if (weighted_) weighted_.backward_step(r, {x});
}

Tensor Projection::weight(Run& r) const {
  if (!input_) return r.weight(spec_.weight);
  if (transposed_)
    r.weight(spec_.weight);  // which may be gathered
  else if (r.first_microbatch() && !r.recomputes())
    quantize_weight(r);
  return r.context().quantized[static_cast<size_t>(spec_.weight)].row;
}

void Projection::multiply(Run& r, Slot x, const Tensor& out) const {
  if (spec_.experts)
    ops::grouped_linear_forward(
        r.exec(),
        {.x = input(r, x), .weight = weight(r), .offsets = spec_.experts->offsets_of(r), .out = out});
  else
    ops::linear_forward(r.exec(), {.x = input(r, x), .weight = weight(r), .out = out});
}

void Projection::multiply_gradient(const Run& r, Slot dy, const Tensor& dx) const {
  if (spec_.experts)
    ops::grouped_linear_backward_data(r.exec(), {.dout = gradient(r, dy),
                                                 .weight = weight_for_gradient(r),
                                                 .offsets = spec_.experts->offsets_of(r),
                                                 .dx = dx});
  else
    ops::linear_backward_data(r.exec(),
                              {.dout = gradient(r, dy), .weight = weight_for_gradient(r), .dx = dx});
}

Tensor Projection::weight_for_gradient(const Run& r) const {
  if (!gradient_) return r.weight(spec_.weight);
  const QuantizedWeight& w = r.context().quantized[static_cast<size_t>(spec_.weight)];
  if (!transposed_) return w.column;
  Tensor t = quantized_tensor(r[transposed_].data, format_, spec_.in, spec_.out, w.row.device);
  if (format_.scaling == Scaling::tensor) t.scales.data = w.row.scales.data;
  return t;
}

void Projection::quantize_weight(Run& r) const {
  const QuantizedWeight& w = r.context().quantized[static_cast<size_t>(spec_.weight)];
  const Tensor weight = r.weight(spec_.weight);
  Tensor row = w.row, column = w.column;
  if (w.amax) {
    ops::largest_magnitude(r.exec(), {.source = {weight}, .amax = w.amax});
    if (const auto ranks = ranks_of_weight_scale(r.layout(), spec_.experts != nullptr))
      r.all_reduce(w.amax, *ranks, comm::Reduce::max);
    ops::update_scales(r.exec(), {.amax = make_tensor(w.amax.data, DType::f32, {1, 1}, w.amax.device),
                                  .scale = make_tensor(row.scales.data, DType::f32, {1}, w.amax.device),
                                  .format = format_.dtype,
                                  .margin = margin_});
  } else if (format_.scaling == Scaling::tensor && r.trains()) {
    const DelayedScales& s = r.context().scales;
    row.scales.amax = column.scales.amax =
        s.amax.ptr<float>() + s.layout.index(spec_.layer, spec_.gemm, Role::weight);
  }
  ops::quantize(r.exec(), {.source = {weight},
                           .row = row,
                           .column = column,
                           .parts = spec_.experts ? spec_.experts->own_experts() : 1});
}

void Projection::wgrad(Run& r, std::string_view name, Slot dy, Slot x,
                       const std::function<void()>& before) const {
  const QuantizedOperand& input = spec_.weighted ? weighted_ : input_;
  const int bias = spec_.bias;
  const Reads read = !input     ? reads(dy, x) | groups()
                     : bias < 0 ? input.column_reads() | gradient_.column_reads()
                                : input.column_reads() | gradient_.column_reads() | reads(dy);
  r.wgrad(name, read, [&] {
    if (before) before();
    const bool accumulate = r.accumulates(spec_.weight);
    const Tensor dout = input ? gradient_.column(r) : rows(r, dy), in = input ? input.column(r) : rows(r, x);
    if (spec_.experts) {
      ops::grouped_linear_backward_weight(r.exec(), {.dout = dout,
                                                     .x = in,
                                                     .offsets = spec_.experts->offsets_of(r),
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

}  // namespace nrl::model
