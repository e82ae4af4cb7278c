#include "core/ops/quantize.h"

#include "core/ops/shared/check.h"
#include "core/ops/traced.h"

namespace nrl::ops {
namespace {

double scale_bytes(const Tensor& t) {
  return t ? static_cast<double>(scale_matrix(t.scales.kind, t.dim(0), t.dim(1)).bytes) : 0.0;
}

double block_scale_bytes(const Tensor& t) {
  return t.scales.kind == Scaling::block128 ? scale_bytes(t) : 0.0;
}

bool is_margin(int margin) {
  return margin >= -64 && margin <= 64;
}

/// Whether `dout` belongs to the output of the activation of x.
bool is_gradient(const QuantizeSource& s) {
  return s.activation != Activation::none && !s.norm && s.dout.rank == 2 && s.dout.dtype == s.x.dtype &&
         dense_rows(s.dout) && s.dout.step(0) % 16 == 0 && s.dout.dim(0) == s.x.dim(0) &&
         s.dout.dim(1) * (s.gated ? 2 : 1) == s.x.dim(1);
}

bool is_source(const QuantizeSource& s) {
  return s.x.data && s.x.rank == 2 && is_f32_or_bf16(s.x) && dense_rows(s.x) && s.x.step(0) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(s.x.data) % 16 == 0 && (!s.norm || s.x.contiguous()) &&
         s.x.dim(1) % (s.gated ? 32 : 16) == 0 && (!s.gated || s.activation != Activation::none) &&
         (!s.dout || is_gradient(s));
}

void check_norm(const QuantizeSource& s) {
  const QuantizeNorm& a = s.norm;
  const int64_t n = s.x.dim(0), k = s.x.dim(1);
  const auto is_weight = [&](const Tensor& t) {
    return t.data && is_f32_or_bf16(t) && t.dtype == a.weight.dtype && is_vector(t, k, t.dtype);
  };
  NRL_CHECK(s.activation == Activation::none && is_weight(a.weight) && (!a.bias || is_weight(a.bias)) &&
                is_vector(a.rstd, n, DType::f32) && (!a.mean || is_vector(a.mean, n, DType::f32)),
            "quantize: a norm of {} with weight {}, bias {}, rstd {}, mean {}", describe(s.x),
            describe(a.weight), describe(a.bias), describe(a.rstd), describe(a.mean));
}

bool is_groups(const Tensor& offsets) {
  return offsets.rank == 1 && offsets.dim(0) >= 2 && is_vector(offsets, offsets.dim(0), DType::i32);
}

void check_part(const char* op, const MatrixPart& p, const Tensor& blocks) {
  constexpr int64_t side = 128;
  const int64_t n = p.x.dim(0), per_row = scale_matrix(Scaling::block128, 1, p.columns).bytes / 4;
  NRL_CHECK(is_f32_or_bf16(p.x) && is_vector(p.x, n, p.x.dtype) && n % 16 == 0 && p.first >= 0 &&
                p.first % 16 == 0 && p.columns > 0 && p.columns % side == 0,
            "{}: x is {}, from element {} of rows of {}", op, describe(p.x), p.first, p.columns);
  NRL_CHECK(is_vector(blocks, blocks.dim(0), DType::f32) &&
                blocks.dim(0) >= ((p.first + n - 1) / p.columns / side + 1) * per_row,
            "{}: {} of blocks of {} elements from {} of rows of {}", op, describe(blocks), n, p.first,
            p.columns);
}

void check_copy(const char* name, const Tensor& t, int64_t rows, int64_t columns) {
  NRL_CHECK((t.dtype == DType::e4m3 || t.dtype == DType::e5m2) && t.rank == 2 && t.dim(0) == rows &&
                t.dim(1) == columns && t.contiguous() && t.scales.kind != Scaling::none && t.scales.data &&
                t.dense_scales(),
            "quantize: {} is {}, wanted FP8 [{}, {}] with scales", name, describe(t), rows, columns);
}

/// A GPU's kernels read bf16. It is checked here because nvcc drops the text of a check.
void check_on_gpu(const char* op, const Exec& exec, const QuantizeSource& s) {
  NRL_CHECK(!exec.libraries || s.x.dtype == DType::bf16, "{}: x is {}, but a GPU has kernels for bf16 only",
            op, describe(s.x));
}

}  // namespace

Cost cost(const Exec&, const Quantize& a) {
  const QuantizeNorm& norm = a.source.norm;
  return {
      .read = bytes_of(a.source.x, a.source.dout, norm.weight, norm.bias, norm.mean, norm.rstd, a.measured),
      .written = bytes_of(a.row, a.column) + scale_bytes(a.row) + scale_bytes(a.column),
      .groups = a.offsets ? a.offsets.dim(0) - 1 : 0};
}

Cost cost(const Exec&, const Transpose& a) {
  return {.read = bytes_of(a.x) + block_scale_bytes(a.x),
          .written = bytes_of(a.out) + block_scale_bytes(a.out)};
}

Cost cost(const Exec&, const LargestMagnitude& a) {
  return {.read = bytes_of(a.source.x, a.source.dout), .written = bytes_of(a.amax)};
}

Cost cost(const Exec&, const BlockMagnitudes& a) {
  return {.read = bytes_of(a.part.x, a.amax), .written = bytes_of(a.amax)};
}

Cost cost(const Exec&, const QuantizePart& a) {
  return {.read = bytes_of(a.part.x, a.scale), .written = bytes_of(a.out)};
}

Cost cost(const Exec&, const UpdateScales& a) {
  return {.read = bytes_of(a.amax), .written = bytes_of(a.amax, a.scale)};
}

void quantize(Exec& exec, const Quantize& a) {
  if (noted(exec, Kernel::quantize, a)) return;
  NRL_CHECK(is_source(a.source) && (a.row || a.column), "quantize: x is {}, dout is {}, row is {}",
            describe(a.source.x), describe(a.source.dout), describe(a.row));
  check_on_gpu("quantize", exec, a.source);
  NRL_CHECK(!a.offsets || (is_groups(a.offsets) && !a.source.norm), "quantize: offsets are {}",
            describe(a.offsets));
  if (a.source.norm) check_norm(a.source);
  const int64_t k = a.source.columns(), rows = a.source.x.dim(0);
  const Tensor& either = a.row ? a.row : a.column;
  const int64_t n = !a.offsets ? rows : a.row ? a.row.dim(0) : a.column.dim(1);
  NRL_CHECK(!a.offsets || n >= grouped_rows(rows, a.offsets.dim(0) - 1, row_unit(either.scales.kind)),
            "quantize: a copy of {} rows for {} rows of groups", n, rows);
  const int64_t unit = row_unit(either.scales.kind);
  NRL_CHECK(a.parts == 1 || (a.parts > 1 && !a.offsets && !a.source.norm && !a.source.dout &&
                             rows % (a.parts * unit) == 0 && k % unit == 0),
            "quantize: {} in {} parts", describe(a.source.x), a.parts);
  NRL_CHECK(!a.source.dout || !a.source.gated || halves_scales(either.scales.kind, k / 2),
            "quantize: gradients of gate and up of {} columns with scales {}", k / 2,
            name_of(either.scales.kind));
  if (a.row) check_copy("row", a.row, n, k);
  if (a.column) check_copy("column", a.column, a.parts * k, n / a.parts);
  NRL_CHECK(!a.column || n / a.parts % 16 == 0, "quantize: the column copy of {}", describe(a.source.x));
  if (a.row && a.column) {
    NRL_CHECK(a.row.dtype == a.column.dtype && a.row.scales.kind == a.column.scales.kind,
              "quantize: row is {}, column is {}", describe(a.row), describe(a.column));
    NRL_CHECK(has_scale_blocks(a.row.scales.kind) ||
                  (a.row.scales.data == a.column.scales.data && a.row.scales.amax == a.column.scales.amax),
              "quantize: the copies have scales of their own");
  }
  const Scales& scales = either.scales;
  NRL_CHECK(!a.measured || (scales.kind == Scaling::tensor && is_vector(a.measured, 1, DType::f32) &&
                            !scales.amax && a.measured.data != scales.data && is_margin(a.margin)),
            "quantize: measured is {}, scales are {}, margin {}", describe(a.measured), name_of(scales.kind),
            a.margin);
  const trace::Range range = traced(exec, Kernel::quantize, a);
  exec.kernels->quantize(exec, a);
}

void transpose(Exec& exec, const Transpose& a) {
  if (noted(exec, Kernel::transpose, a)) return;
  const auto is_codes = [](const Tensor& t) {
    return t.data && t.rank == 2 && (t.dtype == DType::e4m3 || t.dtype == DType::e5m2) && t.contiguous() &&
           t.dim(0) % 16 == 0 && t.dim(1) % 16 == 0;
  };
  NRL_CHECK(is_codes(a.x) && is_codes(a.out) && a.x.dtype == a.out.dtype && a.x.dim(0) == a.out.dim(1) &&
                a.x.dim(1) == a.out.dim(0),
            "transpose: x is {}, out is {}", describe(a.x), describe(a.out));
  const auto blocks = [](const Tensor& t) { return t.scales.data && t.dense_scales(); };
  NRL_CHECK(a.x.scales.kind == a.out.scales.kind &&
                (!has_scale_blocks(a.x.scales.kind) ||
                 (a.x.scales.kind == Scaling::block128 && blocks(a.x) && blocks(a.out))),
            "transpose: scales of x are {}, of out {}", name_of(a.x.scales.kind), name_of(a.out.scales.kind));
  const trace::Range range = traced(exec, Kernel::transpose, a);
  exec.kernels->transpose(exec, a);
}

void largest_magnitude(Exec& exec, const LargestMagnitude& a) {
  if (noted(exec, Kernel::largest_magnitude, a)) return;
  NRL_CHECK(!a.offsets || is_groups(a.offsets), "largest_magnitude: offsets are {}", describe(a.offsets));
  check_on_gpu("largest_magnitude", exec, a.source);
  NRL_CHECK(is_source(a.source) && !a.source.norm && is_vector(a.amax, 1, DType::f32),
            "largest_magnitude: x is {}, dout is {}, amax is {}", describe(a.source.x),
            describe(a.source.dout), describe(a.amax));
  const trace::Range range = traced(exec, Kernel::largest_magnitude, a);
  exec.kernels->largest_magnitude(exec, a);
}

void block_magnitudes(Exec& exec, const BlockMagnitudes& a) {
  if (noted(exec, Kernel::block_magnitudes, a)) return;
  check_part("block_magnitudes", a.part, a.amax);
  const trace::Range range = traced(exec, Kernel::block_magnitudes, a);
  exec.kernels->block_magnitudes(exec, a);
}

void quantize_part(Exec& exec, const QuantizePart& a) {
  if (noted(exec, Kernel::quantize_part, a)) return;
  check_part("quantize_part", a.part, a.scale);
  NRL_CHECK((a.out.dtype == DType::e4m3 || a.out.dtype == DType::e5m2) &&
                is_vector(a.out, a.part.x.dim(0), a.out.dtype),
            "quantize_part: x is {}, out is {}", describe(a.part.x), describe(a.out));
  const trace::Range range = traced(exec, Kernel::quantize_part, a);
  exec.kernels->quantize_part(exec, a);
}

void update_scales(Exec& exec, const UpdateScales& a) {
  if (noted(exec, Kernel::update_scales, a)) return;
  NRL_CHECK(a.amax.rank == 2 && a.amax.dtype == DType::f32 && a.amax.dim(0) > 0 && dense_rows(a.amax) &&
                is_vector(a.scale, a.amax.dim(1), DType::f32) && (a.amax.data || a.amax.numel() == 0),
            "update_scales: amax is {}, scale is {}", describe(a.amax), describe(a.scale));
  NRL_CHECK((a.format == DType::e4m3 || a.format == DType::e5m2) && is_margin(a.margin),
            "update_scales: {} with margin {}", name_of(a.format), a.margin);
  NRL_CHECK(!a.blocks || a.amax.dim(0) == 1, "update_scales: {} of blocks", describe(a.amax));
  const trace::Range range = traced(exec, Kernel::update_scales, a);
  exec.kernels->update_scales(exec, a);
}

}  // namespace nrl::ops
