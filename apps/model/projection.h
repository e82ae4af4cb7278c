#pragma once
// The GEMMs of a weight in a layer, y = x W^T and its gradients, in the formats of the recipe. With FP8
// operands two kinds of steps come with them, which round x before the forward GEMM and dy before dgrad:
//
//            reads                                  kept for backward
//   fprop    x row copy,  W row copy                x column copy
//   dgrad    dy row copy, W column copy
//   wgrad    dy column copy, x column copy
//
// A weight that is kept in FP8 is its row copy; a dgrad step transposes it for dgrad.
//
// Scales of whole tensors are found here: from the values (the ranks that share a tensor agree on them), or
// from earlier steps (DelayedScales). Recomputation rounds with the scales of the forward pass.

#include "apps/model/tensor_parallel.h"
#include "core/ops/quantize.h"

namespace nrl::model {

/// What FP8 copies are made of: a slot, or an activation of it that has no slot (ops::QuantizeSource).
struct Source {
  Slot slot;
  ops::Activation activation = ops::Activation::none;
  bool gated = false;
};

/// The FP8 copies of x or dy.
class QuantizedOperand {
 public:
  QuantizedOperand() = default;  ///< read as it is
  /// `divided`: tensor-parallel ranks have different columns. `rules`: recompute rules of the column copy.
  QuantizedOperand(const precision::Recipe& recipe, const AddSlot& add, int layer, precision::Gemm gemm,
                   precision::Role role, int64_t width, bool divided, std::string_view rules);
  explicit operator bool() const { return static_cast<bool>(row_); }

  /// The steps that write the copies of `source`.
  void forward_steps(Run& r, const Source& source) const;
  void backward_step(Run& r, const Source& source) const;
  Reads row_reads() const { return reads(row_, scale_); }
  Reads column_reads() const { return reads(column_, scale_); }
  /// (N, width), and (width, N).
  Tensor row(const Run& r) const;
  Tensor column(const Run& r) const;

 private:
  static ops::QuantizeSource source_of(const Run& r, const Source& s);
  Tensor with_scales(const Run& r, Tensor t) const;
  /// Finds the scale of `source`.
  void measure(Run& r, const Source& source) const;
  void quantize(Run& r, const Source& source, bool row, bool column) const;

  precision::Format format_;
  int layer_ = 0, margin_ = 0;
  precision::Gemm gemm_{};
  precision::Role role_{};
  bool delayed_ = false, divided_ = false;
  const char* step_ = "";
  Slot row_, column_;  ///< (N, width and its share of scales): codes, then scales of blocks
  int64_t width_ = 0;
  Slot scale_;  ///< (1, 2) f32: scale and amax of a tensor, if found from its own values
};

class Projection {
 public:
  /// `in`, `out`: columns of x and y on this rank. `column`: the weight is split by rows (ColumnInput), else
  /// by columns (RowOutput). `rules`: recompute rules of x.
  Projection(const precision::Recipe& recipe, const AddSlot& add, int layer, precision::Gemm gemm, int weight,
             int bias, int64_t in, int64_t out, bool column, std::string_view rules);

  /// Forward steps between those that write and read x; none if x is read as it is.
  void quantize_input(Run& r, const Source& x) const;
  /// Whether x itself is read by these steps only.
  bool quantizes_input() const { return static_cast<bool>(input_); }
  /// What fprop reads of x.
  Reads input_reads(Slot x) const { return input_ ? input_.row_reads() : reads(x); }
  Tensor input(const Run& r, Slot x) const { return input_ ? input_.row(r) : r[x]; }
  /// The weight as fprop reads it. Its FP8 copies are made here.
  Tensor weight(Run& r) const;

  /// Dgrad steps between those that write and read dy; none if dy is read as it is.
  void quantize_gradient(Run& r, Slot dy) const;
  /// What dgrad reads of dy and of the weight.
  Reads gradient_reads(Slot dy) const {
    return gradient_ ? gradient_.row_reads() | reads(transposed_) : reads(dy);
  }
  Tensor gradient(const Run& r, Slot dy) const { return gradient_ ? gradient_.row(r) : r[dy]; }
  Tensor weight_for_gradient(const Run& r) const;

  /// The wgrad step, with the gradient of the bias; `before` is called first in it.
  void wgrad(Run& r, std::string_view name, Slot dy, Slot x, const std::function<void()>& before = {}) const;

 private:
  void quantize_weight(Run& r) const;

  int layer_;
  precision::Gemm gemm_;
  precision::Format format_;  ///< of the weight
  int margin_;
  int weight_, bias_;
  int64_t in_, out_;
  QuantizedOperand input_, gradient_;
  const char* transpose_ = "";
  Slot transposed_;  ///< (1, in * out): the column copy of a weight that is kept in FP8
};

/// Bytes of one FP8 copy (rows, columns): codes, then scales of blocks.
int64_t quantized_bytes(Scaling scaling, int64_t rows, int64_t columns);
/// The copy in such memory, without a scale of the whole tensor.
Tensor quantized_tensor(void* data, const precision::Format& format, int64_t rows, int64_t columns,
                        Device device);

}  // namespace nrl::model
