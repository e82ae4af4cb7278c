#pragma once
// What the reference kernels share: activations, and access to elements. Any float type is read as double and
// rounded once when written. f64 tensors are accepted too, so that finite differences of the reference are
// exact to double.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"

namespace nrl::ops::reference {

inline constexpr double pi = 3.14159265358979323846, sqrt_2_over_pi = 0.7978845608028654;

/// The numbers of codes 0, 1, ... of an FP8 format, ascending.
inline std::vector<double> fp8_numbers(DType format) {
  const int mantissa = format == DType::e4m3 ? 3 : 2, bias = format == DType::e4m3 ? 7 : 15;
  const double largest = format == DType::e4m3 ? 448 : 57344;
  std::vector<double> out;
  for (int code = 0; out.empty() || out.back() < largest; ++code) {
    const int exponent = code >> mantissa, fraction = code & ((1 << mantissa) - 1);
    const double unit = std::ldexp(1.0, (exponent == 0 ? 1 : exponent) - bias - mantissa);
    out.push_back(unit * (fraction + (exponent == 0 ? 0 : 1 << mantissa)));
  }
  return out;
}
/// The number of a code; NaN for those that are none.
inline double fp8_number(uint8_t code, const std::vector<double>& all) {
  const auto magnitude = static_cast<size_t>(code & 0x7f);
  return magnitude < all.size() ? (code & 0x80 ? -1 : 1) * all[magnitude] : static_cast<double>(NAN);
}

/// The code of the format's number that is nearest to x, even if two are.
inline uint8_t nearest_fp8(double x, const std::vector<double>& all) {
  const double size = std::min(std::fabs(x), all.back());
  const auto above = static_cast<size_t>(std::lower_bound(all.begin(), all.end(), size) - all.begin());
  size_t code = above;
  if (above > 0) {
    const double farther = (all[above] - size) - (size - all[above - 1]);
    if (farther > 0 || (farther == 0 && above % 2 != 0)) --code;
  }
  return static_cast<uint8_t>(std::signbit(x) ? code | 0x80 : code);
}

/// Element (row, column) of a matrix in FP8, times its scale.
inline double load_scaled(const Tensor& t, int64_t row, int64_t column) {
  static const std::vector<double> e4m3 = fp8_numbers(DType::e4m3), e5m2 = fp8_numbers(DType::e5m2);
  const auto code = static_cast<const uint8_t*>(t.data)[row * t.step(0) + column];
  const Scales& s = t.scales;
  const auto* at =
      static_cast<const uint8_t*>(s.data) + scale_offset(s.kind, s.row_step, s.column_step, row, column);
  const double scale = s.kind != Scaling::mx32 ? static_cast<double>(*reinterpret_cast<const float*>(at))
                       : *at == 255            ? static_cast<double>(NAN)
                                               : std::ldexp(1.0, *at - 127);
  return fp8_number(code, t.dtype == DType::e4m3 ? e4m3 : e5m2) * scale;
}

inline double load_at(const Tensor& t, int64_t offset) {
  switch (t.dtype) {
    case DType::f64:
      return static_cast<const double*>(t.data)[offset];
    case DType::f32:
      return static_cast<double>(static_cast<const float*>(t.data)[offset]);
    case DType::bf16:
      return static_cast<double>(static_cast<float>(static_cast<const bf16*>(t.data)[offset]));
    case DType::f16:
      return static_cast<double>(static_cast<float>(static_cast<const f16*>(t.data)[offset]));
    case DType::i32:
      return static_cast<double>(static_cast<const int32_t*>(t.data)[offset]);
    default:
      NRL_CHECK(false, "reference kernels do not read {}", name_of(t.dtype));
      return 0;
  }
}

inline void store_at(const Tensor& t, int64_t offset, double value) {
  switch (t.dtype) {
    case DType::f64:
      static_cast<double*>(t.data)[offset] = value;
      break;
    case DType::f32:
      static_cast<float*>(t.data)[offset] = static_cast<float>(value);
      break;
    case DType::bf16:
      static_cast<bf16*>(t.data)[offset] = bf16(static_cast<float>(value));
      break;
    case DType::f16:
      static_cast<f16*>(t.data)[offset] = f16(static_cast<float>(value));
      break;
    default:
      NRL_CHECK(false, "reference kernels do not write {}", name_of(t.dtype));
  }
}

/// `value` as an element of this type.
inline double rounded(DType dtype, double value) {
  double memory = 0;
  const Tensor one = make_tensor(&memory, dtype, {1});
  store_at(one, 0, value);
  return load_at(one, 0);
}

/// f(x) of an activation.
inline double activation_value(Activation kind, double x) {
  switch (kind) {
    case Activation::silu:
      return x / (1.0 + std::exp(-x));
    case Activation::gelu_tanh:
      return 0.5 * x * (1.0 + std::tanh(sqrt_2_over_pi * (x + 0.044715 * x * x * x)));
    case Activation::gelu_erf:
      return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case Activation::none:
      break;
  }
  return x;
}

/// f'(x).
inline double activation_slope(Activation kind, double x) {
  switch (kind) {
    case Activation::silu: {
      const double s = 1.0 / (1.0 + std::exp(-x));
      return s * (1.0 + x * (1.0 - s));
    }
    case Activation::gelu_tanh: {
      const double t = std::tanh(sqrt_2_over_pi * (x + 0.044715 * x * x * x));
      return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * sqrt_2_over_pi * (1.0 + 3.0 * 0.044715 * x * x);
    }
    case Activation::gelu_erf:
      return 0.5 * std::erfc(-x / std::sqrt(2.0)) + x * std::exp(-0.5 * x * x) / std::sqrt(2.0 * pi);
    case Activation::none:
      break;
  }
  return 1.0;
}

/// Rows are the product of all leading dimensions.
inline int64_t row_count(const Tensor& t) {
  return t.numel() / t.dim(-1);
}

/// Offset of element i of row `row`, for any rank and strides.
inline int64_t offset_of(const Tensor& t, int64_t row, int64_t i) {
  int64_t offset = i * t.step(-1);
  for (int k = t.rank - 2; k >= 0; --k) {
    offset += row % t.dim(k) * t.step(k);
    row /= t.dim(k);
  }
  return offset;
}

inline double load(const Tensor& t, int64_t row, int64_t i) {
  if (t.dtype == DType::e4m3 || t.dtype == DType::e5m2) return load_scaled(t, row, i);
  return load_at(t, offset_of(t, row, i));
}
inline void store(const Tensor& t, int64_t row, int64_t i, double value) {
  store_at(t, offset_of(t, row, i), value);
}
/// A vector's element; an index of an i32 tensor.
inline double load(const Tensor& t, int64_t i) {
  return load_at(t, i * t.step(-1));
}
inline void store(const Tensor& t, int64_t i, double value) {
  store_at(t, i * t.step(-1), value);
}
inline int64_t index(const Tensor& t, int64_t i) {
  return static_cast<int64_t>(load(t, i));
}

/// Rows of a matrix read once, for GEMMs.
struct Matrix {
  int64_t rows = 0, cols = 0;
  std::vector<double> values;

  Matrix(int64_t r, int64_t c) : rows(r), cols(c), values(static_cast<size_t>(r * c)) {}
  /// `r` rows of t from row `first` on.
  Matrix(const Tensor& t, int64_t first, int64_t r) : Matrix(r, t.dim(-1)) {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < cols; ++j) at(i)[j] = load(t, first + i, j);
  }
  explicit Matrix(const Tensor& t) : Matrix(t, 0, row_count(t)) {}

  double* at(int64_t row) { return values.data() + row * cols; }
  const double* at(int64_t row) const { return values.data() + row * cols; }
  Matrix transposed() const {
    Matrix out(cols, rows);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < cols; ++j) out.at(j)[i] = at(i)[j];
    return out;
  }
};

/// sums[j] += sum over i of row[i] * b(i, j), in the order of i.
inline void add_products(std::vector<double>& sums, const double* row, const Matrix& b) {
  for (int64_t i = 0; i < b.rows; ++i) {
    const double x = row[i], *y = b.at(i);
    for (size_t j = 0; j < sums.size(); ++j) sums[j] += x * y[j];
  }
}

/// The largest magnitude of the numbers added so far; a NaN stays.
class Amax {
 public:
  void add(double x) {
    const auto size = static_cast<float>(std::fabs(x));
    if (!(size <= largest_)) largest_ = size;
  }
  /// amax = max(amax, largest), if there is an amax.
  void raise(const Tensor& amax) const {
    if (amax && !(static_cast<double>(largest_) <= load(amax, 0)))
      store(amax, 0, static_cast<double>(largest_));
  }

 private:
  float largest_ = 0;
};

}  // namespace nrl::ops::reference
