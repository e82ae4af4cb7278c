// FP8 operands by search among all numbers of the format.

#include "core/ops/quantize.h"

#include <cstring>

#include "tests/ops/reference/reference.h"

namespace nrl::ops::reference {
namespace {

struct Block {
  int64_t rows, columns;
};
Block block_of(Scaling s) {
  return s == Scaling::row128 ? Block{1, 128} : s == Scaling::block128 ? Block{128, 128} : Block{1, 32};
}

/// One copy; element(i, j) is that of the matrix it stores.
template <class Element>
void quantize_copy(const Tensor& out, const Element& element) {
  const std::vector<double> all = fp8_numbers(out.dtype);
  auto* codes = static_cast<uint8_t*>(out.data);
  const int64_t n = out.dim(0), k = out.dim(1);
  const Scales& s = out.scales;
  if (s.kind == Scaling::tensor) {
    const float inverse = 1.0f / *static_cast<const float*>(s.data);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < k; ++j) {
        const auto x = static_cast<float>(element(i, j));
        codes[i * k + j] = std::isfinite(x) ? nearest_fp8(static_cast<double>(x * inverse), all)
                                            : static_cast<uint8_t>(0x7f);
        // Infinity and NaN compare as their bits do.
        if (!s.amax) continue;
        const float size = std::fabs(x);
        if (std::isnan(x) || (size > *s.amax && !std::isnan(*s.amax))) *s.amax = size;
      }
    return;
  }
  if (s.kind == Scaling::mx32) std::memset(s.data, 0, static_cast<size_t>(scale_matrix(s.kind, n, k).bytes));
  const Block b = block_of(s.kind);
  for (int64_t r = 0; r < n; r += b.rows)
    for (int64_t c = 0; c < k; c += b.columns) {
      const int64_t rows = std::min(n, r + b.rows), columns = std::min(k, c + b.columns);
      double largest = 0;
      bool finite = true;
      for (int64_t i = r; i < rows; ++i)
        for (int64_t j = c; j < columns; ++j) {
          finite = finite && std::isfinite(element(i, j));
          largest = std::max(largest, std::fabs(element(i, j)));
        }
      int byte = finite ? 0 : 255;
      if (finite && largest > 0)
        for (byte = 1; largest > std::ldexp(all.back(), byte - 127);) ++byte;
      auto* at = static_cast<uint8_t*>(s.data) + scale_offset(s.kind, s.row_step, s.column_step, r, c);
      if (s.kind == Scaling::mx32)
        *at = static_cast<uint8_t>(byte);
      else
        *reinterpret_cast<float*>(at) = byte == 255 ? NAN
                                        : byte == 0 ? 0.0f
                                                    : static_cast<float>(std::ldexp(1.0, byte - 127));
      for (int64_t i = r; i < rows; ++i)
        for (int64_t j = c; j < columns; ++j)
          codes[i * k + j] = finite ? nearest_fp8(std::ldexp(element(i, j), 127 - byte), all) : 0;
    }
}

/// Rounded to f32, as kernels compute it.
double source_value(const QuantizeSource& s, int64_t i, int64_t j) {
  if (const QuantizeNorm& norm = s.norm)
    return rounded(s.x.dtype, (load(s.x, i, j) - (norm.mean ? load(norm.mean, i) : 0.0)) *
                                      load(norm.rstd, i) * (load(norm.weight, j) + norm.weight_offset) +
                                  (norm.bias ? load(norm.bias, j) : 0.0));
  if (s.dout) {
    const int64_t width = s.dout.dim(1);
    const double x = load(s.x, i, j % width), dout = load(s.dout, i, j % width);
    if (j >= width) return rounded(s.x.dtype, dout * activation_value(s.activation, x));
    return rounded(s.x.dtype,
                   dout * (s.gated ? load(s.x, i, width + j) : 1.0) * activation_slope(s.activation, x));
  }
  const double value = activation_value(s.activation, load(s.x, i, j));
  return static_cast<double>(static_cast<float>(s.gated ? value * load(s.x, i, s.columns() + j) : value));
}

/// The source's row of each row of a copy; -1: zeros.
std::vector<int64_t> rows_of_copies(const Quantize& a) {
  std::vector<int64_t> rows;
  if (!a.offsets) {
    for (int64_t i = 0; i < a.source.x.dim(0); ++i) rows.push_back(i);
    return rows;
  }
  const int64_t unit = has_scale_blocks((a.row ? a.row : a.column).scales.kind) ? 128 : 16;
  for (int64_t g = 0; g + 1 < a.offsets.dim(0); ++g) {
    rows.resize(static_cast<size_t>((index(a.offsets, g) / unit + g) * unit), -1);
    for (int64_t i = index(a.offsets, g); i < index(a.offsets, g + 1); ++i) rows.push_back(i);
  }
  rows.resize(static_cast<size_t>(a.row ? a.row.dim(0) : a.column.dim(1)), -1);
  return rows;
}

/// The scale of a tensor whose largest magnitude is `amax`; `otherwise` where none was measured.
double scale_of(double amax, DType format, int margin, double otherwise) {
  if (!(amax > 0) || !std::isfinite(amax)) return otherwise;
  const double most = fp8_numbers(format).back();
  return std::clamp(std::ldexp(static_cast<double>(static_cast<float>(amax / most)), margin), 0x1p-126,
                    0x1p127);
}

void quantize_both(Exec& exec, const Quantize& a) {
  if (a.measured) {
    const Tensor& either = a.row ? a.row : a.column;
    *static_cast<float*>(either.scales.data) =
        static_cast<float>(scale_of(load(a.measured, 0), either.dtype, a.margin, 1));
  }
  for (int64_t p = 0; a.parts > 1 && p < a.parts; ++p) quantize_both(exec, part_of(a, p));
  if (a.parts > 1) return;
  const std::vector<int64_t> rows = rows_of_copies(a);
  const int64_t columns = a.row ? a.row.dim(1) : a.column.dim(0);
  std::vector<double> values;  // of the rows of the copies: both read each several times
  values.reserve(rows.size() * static_cast<size_t>(columns));
  for (const int64_t from : rows)
    for (int64_t j = 0; j < columns; ++j) values.push_back(from < 0 ? 0.0 : source_value(a.source, from, j));
  const auto value = [&](int64_t row, int64_t column) { return values[row * columns + column]; };
  if (a.row) quantize_copy(a.row, [&](int64_t i, int64_t j) { return value(i, j); });
  if (a.column) quantize_copy(a.column, [&](int64_t i, int64_t j) { return value(j, i); });
}

void transposed(Exec&, const Transpose& a) {
  const int64_t n = a.x.dim(0), k = a.x.dim(1);
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < k; ++j)
      static_cast<uint8_t*>(a.out.data)[j * n + i] = static_cast<const uint8_t*>(a.x.data)[i * k + j];
  const auto scale = [](const Tensor& t, int64_t i, int64_t j) {
    const Scales& s = t.scales;
    return reinterpret_cast<float*>(static_cast<uint8_t*>(s.data) +
                                    scale_offset(s.kind, s.row_step, s.column_step, i, j));
  };
  if (a.x.scales.kind != Scaling::block128) return;
  for (int64_t i = 0; i < n; i += 128)
    for (int64_t j = 0; j < k; j += 128) *scale(a.out, j, i) = *scale(a.x, i, j);
}

/// The place of an element's block among the scales.
int64_t block_of(const MatrixPart& p, int64_t i) {
  const int64_t row = (p.first + i) / p.columns, column = (p.first + i) % p.columns;
  return row / 128 * ((p.columns / 128 + 3) / 4 * 4) + column / 128;
}

void block_magnitudes_of(Exec&, const BlockMagnitudes& a) {
  for (int64_t i = 0; i < a.part.x.dim(0); ++i) {
    const double size = std::fabs(load(a.part.x, i)), amax = load(a.amax, block_of(a.part, i));
    if (std::isnan(size) || size > amax) store(a.amax, block_of(a.part, i), size);
  }
}

void quantize_part_of(Exec&, const QuantizePart& a) {
  const std::vector<double> all = fp8_numbers(a.out.dtype);
  for (int64_t i = 0; i < a.part.x.dim(0); ++i) {
    const double scale = load(a.scale, block_of(a.part, i));
    static_cast<uint8_t*>(a.out.data)[i] =
        std::isnan(scale)
            ? uint8_t{0}
            : nearest_fp8(scale > 0 ? load(a.part.x, i) / scale : std::copysign(0.0, load(a.part.x, i)), all);
  }
}

void largest(Exec&, const LargestMagnitude& a) {
  double amax = load(a.amax, 0);
  const int64_t n = a.offsets ? index(a.offsets, a.offsets.dim(0) - 1) : a.source.x.dim(0);
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < a.source.columns(); ++j) {
      const double size = std::fabs(source_value(a.source, i, j));
      if (std::isnan(size) || size > amax) amax = size;
    }
  store(a.amax, 0, amax);
}

void update(Exec&, const UpdateScales& a) {
  const double most = fp8_numbers(a.format).back();
  if (a.blocks) {
    for (int64_t i = 0; i < a.scale.dim(0); ++i) {
      const double amax = load(a.amax, 0, i);
      double scale = amax > 0 ? 0x1p-126 : 0;
      while (std::isfinite(amax) && amax > scale * most) scale *= 2;
      store(a.scale, i, std::isfinite(amax) ? scale : static_cast<double>(NAN));
      store(a.amax, 0, i, 0);
    }
    return;
  }
  for (int64_t i = 0; i < a.scale.dim(0); ++i) {
    std::vector<double> history;
    for (int64_t r = 0; r < a.amax.dim(0); ++r) {
      const double v = load(a.amax, r, i);
      history.push_back(std::isfinite(v) ? v : 0);
    }
    const double amax = a.most_recent ? history[0] : *std::max_element(history.begin(), history.end());
    for (int64_t r = a.amax.dim(0) - 1; r > 0; --r) store(a.amax, r, i, history[r - 1]);
    store(a.amax, 0, i, 0);
    store(a.scale, i, scale_of(amax, a.format, a.margin, a.keep ? load(a.scale, i) : 1.0));
  }
}

}  // namespace

void fill_quantize(KernelTable& table) {
  table.quantize = quantize_both;
  table.transpose = transposed;
  table.largest_magnitude = largest;
  table.block_magnitudes = block_magnitudes_of;
  table.quantize_part = quantize_part_of;
  table.update_scales = update;
}

}  // namespace nrl::ops::reference
