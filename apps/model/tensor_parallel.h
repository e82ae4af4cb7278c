#pragma once
// The boundaries between the residual stream and the matrices that tensor-parallel ranks divide. Inside of
// them every rank has all tokens of the microbatch and a part of every matrix. Outside, all ranks have the
// same stream, or with sequence parallelism each has its part of the tokens:
//
//                   forward                                 backward
//   ColumnInput     nothing, or all-gather                  all-reduce, or reduce-scatter
//   RowOutput       all-reduce, or reduce-scatter           nothing, or all-gather
//
// A gathered input is kept for the gradient of the weights, so that both columns communicate the same bytes.
// Its slot has the recompute rule "gather", with which the backward pass gathers it again. On a rank alone
// both are empty: the outer and the inner slot are one.
//
// Shapes: N tokens of the microbatch, n of them on this rank (sequence_rows), H hidden size.

#include <functional>

#include "apps/model/layer.h"

namespace nrl::model {

/// Adds a slot to the layer's table.
using AddSlot = std::function<Slot(const memory::SlotSpec&)>;

/// The recompute rule of inputs that are gathered again in the backward pass.
inline constexpr std::string_view gather_rule = "gather";

/// The input of matrices split by rows of outputs (columns of the product).
class ColumnInput {
 public:
  /// `in` (n, H) is the input, `d_in` (n, H) its gradient; the types are theirs.
  ColumnInput(const ModelLayout& layout, const AddSlot& add, Slot in, Slot d_in, int64_t hidden,
              DType in_type, DType d_in_type);
  /// A forward step with sequence parallelism, else nothing.
  void gather(Run& r) const;
  /// For the step that has written d_x and names d_in as well: the sum over the ranks becomes d_in.
  void reduce(Run& r) const;

  Slot x;    ///< (N, H): what the matrices read
  Slot d_x;  ///< (N, H): this rank's part of the gradient

 private:
  Slot in_, d_in_;
};

/// The output of matrices split by their inputs.
class RowOutput {
 public:
  /// `out` (n, H) is the output, `d_out` (n, H) its gradient; the types are theirs.
  RowOutput(const ModelLayout& layout, const AddSlot& add, Slot out, Slot d_out, int64_t hidden,
            DType out_type, DType d_out_type);
  /// For the step that has written `partial` and names `out` as well: the sum over the ranks becomes `out`.
  void reduce(Run& r) const;
  /// A dgrad step with sequence parallelism, else nothing.
  void gather(Run& r) const;
  /// The bias that this rank's part gets: one of the ranks adds it. Empty for parameter -1.
  static Tensor bias(const Run& r, int parameter);

  Slot partial;  ///< (N, H): this rank's part of the sum
  Slot d_full;   ///< (N, H): the gradient of every token's output

 private:
  Slot out_, d_out_;
};

}  // namespace nrl::model
