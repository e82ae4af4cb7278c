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
// FP8 GEMMs may read rows that their ranks have rounded before the gather: then the operand gathers codes
// (quantized_value.h), and here the outer and the inner slot are one.
// With overlap (gemm_overlap.h) communication overlaps the GEMMs. The gradient of a column input is summed
// during wgrad, and an input that is gathered again arrives during dgrad. Rows that are rounded to FP8 after
// the gather must all be there before: only sums overlap. Codes that are gathered again do not overlap.
//
// Shapes: N tokens of the microbatch, n of them on this rank (sequence_rows), H hidden size.

#include "apps/model/linear/gemm_overlap.h"
#include "apps/model/program/layer.h"

namespace nrl::model {

/// The recompute rule of inputs that are gathered again in the backward pass.
inline constexpr std::string_view gather_rule = "gather";

/// How a boundary communicates.
struct Boundary {
  Slot codes = {};       ///< the FP8 codes of all rows, which are gathered elsewhere
  bool whole = false;    ///< an FP8 copy is made of all gathered rows
  bool overlaps = true;  ///< as the layout says
};

/// The overlap that the layout configures, or none.
CommOverlap overlap_of(const LayerBuilder& b, bool overlaps);

/// Both sides of matrices that tensor-parallel ranks split: this rank's rows, and how they are communicated.
class SplitRows {
 protected:
  /// `own` (n, H) is an activation, `d_own` (n, H) its gradient.
  SplitRows(const LayerBuilder& b, Slot own, Slot d_own, const Boundary& boundary);
  bool overlaps() const { return sum_.method != TpCommOverlap::none; }

  CommOverlap gather_, sum_;
  Slot own_, d_own_, codes_;
};

/// The input of matrices split by rows of outputs (columns of the product).
class ColumnInput : private SplitRows {
 public:
  /// `in` (n, H) is the input, an activation, `d_in` (n, H) its gradient.
  ColumnInput(const LayerBuilder& b, Slot in, Slot d_in, const Boundary& boundary);
  /// A forward step with sequence parallelism, unless codes are gathered; else nothing.
  void gather(Run& r) const;
  /// For the step after it, which reads x or a copy of it in another format: calls `gemm` for all `rows`.
  void multiply(const Run& r, const Tensor& rows, const GemmOfRows& gemm) const;
  /// Before dgrad: with overlap, a step that starts to gather x again if it was not kept.
  void gather_again(Run& r) const;
  /// For a wgrad step that reads x: waits until it is complete.
  void wait(const Run& r) const { wait_for(r, x); }
  /// For the step that has written d_x and names d_in as well: starts to sum over the ranks. Without overlap
  /// the sum is d_in when it returns.
  void reduce(const Run& r) const;
  /// After wgrad: with overlap, a step after which the sum is d_in.
  void finish_reduce(Run& r) const;

  Slot x;    ///< (N, H): what the matrices read; `in` where codes are gathered
  Slot d_x;  ///< (N, H): this rank's part of the gradient

 private:
  bool gathers() const { return x.id != own_.id; }
};

/// The output of matrices split by their inputs.
class RowOutput : private SplitRows {
 public:
  /// `out` (n, H) is the output, an activation, `d_out` (n, H) its gradient.
  RowOutput(const LayerBuilder& b, Slot out, Slot d_out, const Boundary& boundary);
  /// For a step that writes `partial` and `out`: calls `gemm` for all rows of `partial`; the sum over the
  /// ranks becomes `out`.
  void multiply(const Run& r, const GemmOfRows& gemm) const;
  /// A dgrad step with sequence parallelism, unless codes are gathered; else nothing.
  void gather(Run& r) const;
  /// For the step after it, which reads d_full or a copy of it: calls `gemm` for all `rows`.
  void multiply_gradient(const Run& r, const Tensor& rows, const GemmOfRows& gemm) const;
  /// The bias that this rank's part gets: one of the ranks adds it. Empty for parameter -1.
  static Tensor bias(const Run& r, int parameter);

  Slot partial;  ///< (N, H): this rank's part of the sum
  Slot d_full;   ///< (N, H): the gradient of every token's output; `d_out` where codes are gathered
};

}  // namespace nrl::model
