#pragma once
// Rows of tensors of rank 1 to 3 whose leading dimensions may be strided.

#include <cstdint>

#include "core/tensor/tensor.h"

namespace nrl::ops::NRL_ISA {

/// The layout of one tensor's rows; row r of (N, heads, D) is head r % heads of token r / heads.
struct RowLayout {
  int64_t inner = 1, outer_step = 0, inner_step = 0;

  explicit RowLayout(const Tensor& t) {
    if (t.rank == 3) {
      inner = t.shape[1];
      outer_step = t.stride[0];
      inner_step = t.stride[1];
    } else if (t.rank == 2) {
      outer_step = t.stride[0];
    }
  }
  int64_t offset(int64_t row) const {
    return inner == 1 ? row * outer_step : (row / inner) * outer_step + (row % inner) * inner_step;
  }
};

/// Pointer to the rows of a tensor that may be absent.
template <class T>
struct RowPointer {
  T* data;
  RowLayout layout;
  explicit RowPointer(const Tensor& t) : data(static_cast<T*>(t.data)), layout(t) {}
  T* operator[](int64_t row) const { return data ? data + layout.offset(row) : nullptr; }
};

}  // namespace nrl::ops::NRL_ISA
