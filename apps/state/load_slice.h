#pragma once
// Slices of weights between files and memory: for checkpoint.cpp and stored_weights.cpp.

#include <cstdint>
#include <string_view>
#include <vector>

#include "apps/engine/group_tensors.h"
#include "core/base/error.h"
#include "core/base/finite.h"
#include "core/io/staging.h"
#include "core/io/tensor_slice.h"

namespace nrl::train {

/// The shape of the logical tensor of a part in the file.
std::vector<int64_t> shape_on_disk(const model::Part& part);

/// A part of a weight in the layout of the file.
TensorSlice slice_of(const engine::WeightSlice& weight);

/// fill_memory() that rejects NaN and infinity: they spread through the whole model within one step, and here
/// the tensor can still be named. `where()`: its files.
template <class Where, class Fill>
void load_finite(const Where& where, std::string_view name, DType dtype, void* data, int64_t count,
                 int64_t unit, Staging* staging, const Fill& fill) {
  int64_t bad = 0;
  fill_memory(staging, data, count, unit, [&](int64_t first, int64_t n, void* out) {
    fill(first, n, out);
    bad += count_non_finite(dtype, out, static_cast<size_t>(n * unit));
  });
  if (bad > 0)
    fail(Exit::data, "{}: tensor \"{}\" has {} NaN or infinite values of {}; expected finite values", where(),
         name, bad, count * unit / size_of(dtype));
}

/// Fills a slice; `read` does so for one that has some of its rows in memory, in host memory.
template <class Where, class Read>
void load_slice(const Where& where, std::string_view name, const TensorSlice& slice, Staging* staging,
                const Read& read) {
  const int64_t rows = slice.transposed ? slice.columns : slice.rows;
  const int64_t row_bytes = (slice.transposed ? slice.rows : slice.columns) * size_of(slice.dtype);
  load_finite(where, name, slice.dtype, slice.data, rows, row_bytes, staging,
              [&](int64_t first, int64_t n, void* out) {
                TensorSlice part = slice;
                (slice.transposed ? part.column : part.row) += first;
                (slice.transposed ? part.columns : part.rows) = n;
                part.data = out;
                read(part);
              });
}

}  // namespace nrl::train
