#pragma once
// How far two bf16 results of attention are apart, for tests and benchmarks.

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace nrl::ops {

/// Two correct implementations differ by less: both round P, dS and the result to bf16, half a unit of 2^-8
/// each. Wrong statistics, masks or strides give differences near 1.
inline constexpr double attention_difference_limit = 2e-2;

/// The largest |got - want| / (|want| + rms of want's row + total_rms / 50) over (rows, width) elements that
/// got(row, i) and want(row, i) return; infinite where one is not finite. By rows, because early rows of a
/// causal result are many times larger than late ones; the last term is for rows that cancel to nothing.
template <class Got, class Want>
double largest_difference(int64_t rows, int64_t width, const Got& got, const Want& want, double total_rms) {
  double largest = 0;
  for (int64_t r = 0; r < rows; ++r) {
    double squares = 0;
    for (int64_t i = 0; i < width; ++i) squares += want(r, i) * want(r, i);
    const double size = std::sqrt(squares / static_cast<double>(width)) + total_rms / 50;
    for (int64_t i = 0; i < width; ++i) {
      const double w = want(r, i), difference = std::fabs(got(r, i) - w);
      if (!std::isfinite(difference)) return INFINITY;
      if (difference > 0) largest = std::max(largest, difference / (std::fabs(w) + size));
    }
  }
  return largest;
}

/// Root mean square of (rows, width) elements.
template <class Value>
double rms_of(int64_t rows, int64_t width, const Value& value) {
  double squares = 0;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < width; ++i) squares += value(r, i) * value(r, i);
  return rows * width > 0 ? std::sqrt(squares / static_cast<double>(rows * width)) : 0;
}

}  // namespace nrl::ops
