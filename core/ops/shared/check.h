#pragma once
// Checks of the dispatch functions. A failure is a bug of the caller: exit 70 with the op and the tensors.

#include <cstdint>

#include "core/tensor/tensor.h"

namespace nrl::ops {

/// f32 or bf16, without scales.
inline bool is_f32_or_bf16(const Tensor& t) {
  return (t.dtype == DType::f32 || t.dtype == DType::bf16) && t.scales.kind == Scaling::none;
}
/// f32, bf16 or f16, without scales: the element types of activations.
inline bool is_float(const Tensor& t) {
  return is_f32_or_bf16(t) || (t.dtype == DType::f16 && t.scales.kind == Scaling::none);
}
/// Element types that ops take together: f32 and bf16 in any combination, f16 with f16.
inline bool are_float_pair(const Tensor& a, const Tensor& b) {
  return is_float(a) && is_float(b) && (a.dtype == DType::f16) == (b.dtype == DType::f16);
}

/// An FP8 operand of a GEMM (quantize.h).
inline bool is_fp8(const Tensor& t) {
  return t.dtype == DType::e4m3 || t.dtype == DType::e5m2;
}

/// True when the last dimension is contiguous; rows may be strided.
inline bool dense_rows(const Tensor& t) {
  return t.rank >= 1 && (t.dim(-1) <= 1 || t.step(-1) == 1);
}

inline bool same_shape(const Tensor& a, const Tensor& b) {
  if (a.rank != b.rank) return false;
  for (int i = 0; i < a.rank; ++i) {
    if (a.dim(i) != b.dim(i)) return false;
  }
  return true;
}

/// `t` is a contiguous vector of n elements of `dtype`.
inline bool is_vector(const Tensor& t, int64_t n, DType dtype) {
  return t.data && t.rank == 1 && t.dim(0) == n && t.contiguous() && t.dtype == dtype;
}

/// True for the same elements or no common byte: the aliasing that element-wise kernels allow.
inline bool same_or_disjoint(const Tensor& a, const Tensor& b) {
  if (!a.data || !b.data || a.numel() == 0 || b.numel() == 0) return true;
  if (a.data == b.data && a.dtype == b.dtype && a.shape == b.shape && a.stride == b.stride) return true;
  auto extent = [](const Tensor& t) {
    int64_t last = 0;
    for (int i = 0; i < t.rank; ++i) last += (t.dim(i) - 1) * t.step(i);
    return (last + 1) * size_of(t.dtype);
  };
  const auto* pa = static_cast<const char*>(a.data);
  const auto* pb = static_cast<const char*>(b.data);
  if (pa + extent(a) <= pb || pb + extent(b) <= pa) return true;
  // Column slices of one matrix interleave without touching: equal row strides and disjoint column ranges.
  if (a.rank >= 2 && b.rank >= 2 && a.dtype == b.dtype && a.step(0) == b.step(0)) {
    auto row = [&extent](const Tensor& t) {
      Tensor first = t;
      first.shape[0] = 1;
      return extent(first);
    };
    const int64_t width = a.step(0) * size_of(a.dtype);
    int64_t delta = (pb - pa) % width;
    if (delta < 0) delta += width;
    return delta >= row(a) && delta + row(b) <= width;
  }
  return false;
}

}  // namespace nrl::ops
