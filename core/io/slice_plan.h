#pragma once
// Assigns each tensor of a checkpoint to the rank that writes it, and lists the slices it is assembled from.

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/io/tensor_slice.h"

namespace nrl {

/// Equal on every rank. Of slices held by several ranks, one is used.
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
    std::vector<Source> sources;  ///< cover every element once; sorted by row, then column
    int64_t height() const { return shape.empty() ? 1 : shape[0]; }
    int64_t width() const { return shape.size() == 2 ? shape[1] : 1; }
    int64_t bytes() const { return height() * width() * size_of(dtype); }
  };
  std::vector<Tensor> tensors;

  /// Ranks that own a tensor, in ascending order.
  std::vector<int> owners() const;

  /// The part of each of `ranks` ranks, in the order of the plan: the tensors that it owns, with all sources,
  /// and those that it sends slices of, with these alone.
  std::vector<SlicePlan> parts(int ranks) const;

  std::string to_text() const;
  static SlicePlan from_text(const std::string& text);
};

/// The part of a plan that one rank needs.
struct SliceShare {
  std::string slices;       ///< slices_to_text() of the rank, from which the plan was made
  SlicePlan plan;           ///< its part
  std::vector<int> owners;  ///< of the whole plan
  std::string index;        ///< rank 0, several owners: the text of STEM.safetensors.index.json
};

/// This rank's slices as text, for plan_slices() on rank 0. A tensor may have several slices.
std::string slices_to_text(std::span<const TensorSlice> slices);

/// The plan from the texts of all ranks. Rank 0 writes everything if it holds everything; otherwise each
/// tensor is written by one of the ranks that hold most of it, with the load balanced. Gaps, overlaps or
/// contradicting descriptions of a tensor are Exit::internal. `one_owner`: rank 0 writes everything.
SlicePlan plan_slices(const std::vector<std::string>& by_rank, bool one_owner = false);

}  // namespace nrl
