#include "apps/model/linear/quantized_value.h"

#include "apps/model/linear/gemm_overlap.h"
#include "apps/model/spec/rank_groups.h"
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

/// The groups of ranks that agree, one after the other, on the scale of x or dy found from its values: the
/// ranks with parts of a microbatch and, for experts' rows, the ranks that exchange tokens. `parts`:
/// tensor-parallel ranks have different columns or rows.
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

}  // namespace

std::optional<parallel::GroupId> ranks_of_rounds(const LayerBuilder& b) {
  const ModelLayout& layout = b.layout;
  const int of_microbatch = layout.tensor * layout.context, of_experts = layout.expert_ranks();
  if (b.recipe.of(b.layer, Gemm::experts_in, Role::input).scaling != Scaling::tensor ||
      b.recipe.quantized().amax_history > 0 || of_experts % of_microbatch == 0)
    return std::nullopt;
  // Groups of which neither divides the other form a chain over all ranks.
  return of_microbatch % of_experts == 0 ? microbatch_ranks(layout.tensor, layout.context)
                                         : batch_ranks(layout.tensor);
}

QuantizedValue::QuantizedValue(const LayerBuilder& b, const QuantizedSpec& operand)
    : spec_(operand),
      layer_(b.layer),
      format_(b.recipe.of(b.layer, operand.gemm, operand.role)),
      margin_(b.recipe.quantized().margin),
      delayed_(b.recipe.quantized().amax_history > 0) {
  if (format_.scaling == Scaling::none) return;
  const auto name = [&](const char* what) {
    return trace::intern(fmt::format("{} {}{} {}", name_of(operand.gemm), operand.row ? "" : "weighted ",
                                     name_of(operand.role), what));
  };
  step_ = operand.gathers ? "gather" : name("to FP8");
  column_step_ = operand.gathers ? name("FP8 transposed") : step_;
  const int64_t bytes = slot_width(format_.scaling, operand.width);
  const RowDomain rows = !operand.groups                   ? token_rows
                         : row_unit(format_.scaling) == 16 ? dispatched_rows_by_16
                                                           : dispatched_rows_by_128;
  const auto copy = [&](const char* what, std::string_view rules) {
    return b.add({.name = name(what), .width = bytes, .dtype = DType::u8, .rows = rows, .rules = rules});
  };
  if (operand.row) row_ = copy("FP8", operand.gathers ? operand.rules : operand.row_rules);
  if (operand.column) column_ = copy("FP8 transposed", operand.rules);
  if (format_.scaling != Scaling::tensor || delayed_) return;
  scale_ = b.number(name("scale"));
  amax_ = b.number(name("amax"));
}

Tensor QuantizedValue::with_scales(const Run& r, Tensor t) const {
  if (format_.scaling != Scaling::tensor) return t;
  if (scale_) {
    t.scales.data = r[scale_].data;
    return t;
  }
  const DelayedScales& s = r.context().fp8->delayed();
  const int index = s.layout.index(layer_, spec_.gemm, spec_.role);
  t.scales.data = s.aligned.rows(index, 1).data;
  // Evaluation must not change the state of training; the amax of a recomputed tensor is already known.
  if (r.trains()) t.scales.amax = s.amax.ptr<float>() + index;
  return t;
}

Tensor QuantizedValue::row(const Run& r) const {
  const Tensor t = r[row_];
  return with_scales(r, quantized_tensor(t.data, format_, t.dim(0), spec_.width, t.device));
}

Tensor QuantizedValue::column(const Run& r) const {
  const Tensor t = r[column_];
  return with_scales(r, quantized_tensor(t.data, format_, spec_.width, t.dim(0), t.device));
}

ops::QuantizeSource QuantizedValue::values_of(const Run& r, const Value& s) const {
  if (s.norm) return s.norm->source(r);
  const auto rows = [&](Slot slot) { return rows_of(r, slot, spec_.groups); };
  const Tensor x = rows(s.slot);
  return {.x = s.columns > 0 ? x.columns(s.column, s.columns) : x,
          .activation = s.activation,
          .gated = s.gated,
          .dout = s.d_out ? rows(s.d_out) : Tensor{}};
}

Tensor QuantizedValue::offsets_of(const Run& r) const {
  return spec_.groups ? spec_.groups->offsets_of(r) : Tensor{};
}

Reads QuantizedValue::group_reads() const {
  return spec_.groups ? reads(spec_.groups->offsets) : Reads{};
}

Reads QuantizedValue::reads_of(const Value& source) const {
  return (source.norm ? source.norm->reads_of_source() : reads(source.slot, source.d_out, source.amax)) |
         group_reads();
}

Tensor QuantizedValue::measure(Run& r, const Value& source) const {
  if (!scale_) return {};
  const auto ranks = ranks_of_scale(r.layout(), spec_.divided || spec_.gathers, spec_.groups != nullptr);
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

void QuantizedValue::quantize(Run& r, const Value& source, bool with_row, bool with_column,
                              const Tensor& measured) const {
  if (spec_.gathers) return gather(r, source, measured);
  ops::quantize(r.exec(), {.source = values_of(r, source),
                           .row = with_row && row_ ? row(r) : Tensor{},
                           .column = with_column && column_ ? column(r) : Tensor{},
                           .offsets = offsets_of(r),
                           .measured = measured,
                           .margin = margin_});
}

void QuantizedValue::gather(Run& r, const Value& source, const Tensor& measured) const {
  const Tensor codes = row(r);
  const int64_t n = codes.dim(0) / r.layout().tensor;
  ops::quantize(r.exec(), {.source = values_of(r, source),
                           .row = codes.rows(n * r.layout().tensor_rank, n),
                           .measured = measured,
                           .margin = margin_});
  start_gather_in_place(r, spec_.overlap, row_);
}

void QuantizedValue::forward_steps(Run& r, const Value& source) const {
  const Reads from = reads_of(source), measured = source.norm ? from | reads(amax_) : from;
  const Slot column = column_follows() ? Slot{} : column_;
  r.step(memory::training, step_, measured, writes(row_, column, scale_, amax_),
         [&] { quantize(r, source, true, true, measure(r, source)); });
  const auto inference = memory::evaluation | (spec_.generation ? memory::generation : 0);
  r.step(inference, step_, measured, writes(row_, scale_, amax_),
         [&] { quantize(r, source, true, false, measure(r, source)); });
  // Each copy has its own step, so that only the copies that are read are recomputed.
  r.step(memory::recompute, step_, from | reads(scale_), writes(row_),
         [&] { quantize(r, source, true, false); });
  if (column)
    r.step(memory::recompute, column_step_, from | reads(scale_), writes(column),
           [&] { quantize(r, source, false, true); });
}

void QuantizedValue::forward_column_step(Run& r) const {
  if (column_follows())
    r.step(memory::training | memory::recompute, column_step_, row_reads(), writes(column_),
           [&] { ops::transpose(r.exec(), {.x = row(r), .out = column(r)}); });
}

void QuantizedValue::backward_column_step(Run& r) const {
  if (column_follows())
    r.dgrad(column_step_, row_reads(), writes(column_),
            [&] { ops::transpose(r.exec(), {.x = row(r), .out = column(r)}); });
}

void QuantizedValue::backward_step(Run& r, const Value& source) const {
  r.dgrad(step_, reads_of(source), writes(row_, column_follows() ? Slot{} : column_, scale_, amax_),
          [&] { quantize(r, source, true, true, measure(r, source)); });
}

}  // namespace nrl::model
