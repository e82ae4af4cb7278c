#pragma once
// Which rank writes which tensor of a checkpoint, and from whose slices.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/io/tensor_slice.h"

namespace nrl {

/// The same on every rank. Slices that several ranks hold are taken from one of them.
struct SlicePlan {
  struct Source {
    int rank = 0;
    int64_t row = 0, rows = 0, column = 0, columns = 0;
    bool transposed = false;
  };
  struct Tensor {
    std::string name;
    DType dtype = DType::f32;
    std::vector<int64_t> shape;
    int owner = 0;
    std::vector<Source> sources;  ///< they cover every element once
    int64_t height() const { return shape.empty() ? 1 : shape[0]; }
    int64_t width() const { return shape.size() == 2 ? shape[1] : 1; }
    int64_t bytes() const { return height() * width() * size_of(dtype); }
  };
  std::vector<Tensor> tensors;

  /// Ranks that own a tensor, in ascending order.
  std::vector<int> owners() const;

  std::string to_text() const;
  static SlicePlan from_text(const std::string& text);
};

/// What this rank holds, for plan_slices() on rank 0. A tensor may have several slices.
std::string slices_to_text(std::span<const TensorSlice> slices);

/// The plan from the texts of all ranks. Rank 0 writes everything when it holds everything; otherwise each
/// tensor is written by one of the ranks that hold most of it, so that the ranks get about equally much.
/// Slices with gaps, overlaps or different descriptions of one tensor are Exit::internal.
SlicePlan plan_slices(const std::vector<std::string>& by_rank);

}  // namespace nrl
