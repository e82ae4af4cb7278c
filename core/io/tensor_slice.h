#pragma once
// Rectangular slices of stored tensors: how a rank that holds a part of a parameter reads and writes the
// Hugging Face tensor.

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/dtype.h"

namespace nrl {

/// Rows [row, row + rows) and columns [column, column + columns) of a stored tensor of rank 1 or 2, in this
/// rank's memory. A tensor of rank 1 has one column.
struct TensorSlice {
  std::string name;
  DType dtype = DType::f32;    ///< of `data`
  std::vector<int64_t> shape;  ///< of the stored tensor
  int64_t row = 0, rows = 0, column = 0, columns = 1;
  void* data = nullptr;     ///< rows * columns elements without gaps
  bool transposed = false;  ///< `data` is (columns, rows)

  int64_t width() const { return shape.size() == 2 ? shape[1] : 1; }  ///< columns of the stored tensor
};

/// Buffer size for data that must be transposed, converted or assembled: slices are processed in blocks of
/// rows of about this many bytes.
inline constexpr int64_t slice_block_bytes = int64_t{4} << 20;

/// Rows of `row_bytes` bytes in a block, at least one.
int64_t slice_block_rows(int64_t row_bytes);

/// Copies rows [row, row + rows) of the stored tensor, which must lie inside the slice, to `out`, whose rows
/// are `stride` elements apart.
void copy_rows(const TensorSlice& slice, int64_t row, int64_t rows, void* out, int64_t stride);

/// Fills slice.data. `read(offset, count, out)` must supply `count` elements of the stored tensor, of type
/// `stored`, from element `offset` in row-major order. Converts between f32, bf16 and f16.
void read_slice(const TensorSlice& slice, DType stored,
                const std::function<void(int64_t offset, int64_t count, void* out)>& read);

}  // namespace nrl
