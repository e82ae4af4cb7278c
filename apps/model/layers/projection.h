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
// With sequence parallelism the ranks have parts of the rows of x, or of dy. Where each rounds its own
// (gathers_fp8()) the rounding step gathers the codes, and the column copy is their transpose.
//
// Scales of whole tensors are found here: from the values (the ranks that share a tensor agree on them), or
// from earlier steps (DelayedScales). Recomputation rounds with the scales of the forward pass.
//
// The weight may hold all experts of a layer, and each expert multiplies its own rows
// (core/ops/grouped_linear.h). The experts are one parameter, their rows one tensor, and either has one scale
// if it is scaled as a whole.

#include "apps/model/layers/expert_dispatch.h"
#include "apps/model/layers/pre_norm.h"

namespace nrl::model {

/// The source of FP8 copies (ops::QuantizeSource): a slot, or values that have no slot: the slot's
/// activation, the gradient of that activation, or the output of a norm.
struct Source {
  Slot slot = {};
  ops::Activation activation = ops::Activation::none;
  bool gated = false;
  Slot d_out = {};                  ///< gradient of the activation: the source is the gradient of `slot`
  Slot amax = {};                   ///< amax of the source; set only if its producer computed it
  const PreNorm* norm = nullptr;    ///< replaces the slot
  int64_t column = 0, columns = 0;  ///< the slot's columns that are the source; 0 columns: all
};
/// The input of the GEMMs after a norm: `x`, or the output that the norm does not store.
inline Source source_of(const PreNorm& norm, Slot x) {
  return norm.out ? Source{x} : Source{.norm = &norm};
}

/// The slot `stored` if the layer has it, else the source that computes its values.
inline Source stored_or(Slot stored, const Source& computed) {
  return stored ? Source{stored} : computed;
}

/// An operand of a GEMM and its FP8 copies. Attention has row copies only; its backward pass reads them too.
struct OperandSpec {
  int layer = 0;
  precision::Gemm gemm{};
  precision::Role role{};
  int64_t width = 0;
  bool divided = false;         ///< tensor-parallel ranks have different columns
  bool gathers = false;         ///< they have different rows, round them and gather the codes
  std::string_view rules = "";  ///< recompute rules of the column copy
  std::string_view row_rules = "";
  bool row = true, column = true;
  bool generation = true;  ///< generation reads it
  /// The experts whose rows the operand holds; must outlive it. Null: the rows are tokens.
  const ExpertDispatch* experts = nullptr;
};

/// The FP8 copies of x or dy.
class QuantizedOperand {
 public:
  QuantizedOperand() = default;  ///< no copies: the operand is read as it is
  QuantizedOperand(const precision::Recipe& recipe, const AddSlot& add, const OperandSpec& operand);
  explicit operator bool() const { return row_ || column_; }

  /// The steps that write the copies of `source`.
  void forward_steps(Run& r, const Source& source) const;
  void backward_step(Run& r, const Source& source) const;
  /// (1) f32: the amax from which the scale is found; if the source is a norm, the norm writes it. Unset if
  /// the scale is found otherwise.
  Slot amax() const { return amax_; }
  Scaling scaling() const { return format_.scaling; }
  Reads row_reads() const { return reads(row_, scale_) | group_reads(); }
  Reads column_reads() const { return reads(column_, scale_) | group_reads(); }
  /// (N, width), and (width, N).
  Tensor row(const Run& r) const;
  Tensor column(const Run& r) const;

 private:
  ops::QuantizeSource values_of(const Run& r, const Source& s) const;
  Tensor offsets_of(const Run& r) const;
  Reads group_reads() const;
  Tensor with_scales(const Run& r, Tensor t) const;
  Reads reads_of(const Source& source) const;
  /// Returns the amax from which quantize() finds the scale; empty if it finds none from a whole tensor.
  Tensor measure(Run& r, const Source& source) const;
  void quantize(Run& r, const Source& source, bool row, bool column, const Tensor& measured = {}) const;
  /// Rounds this rank's rows and gathers the rows of all ranks.
  void gather(Run& r, const Source& source, const Tensor& measured) const;

  OperandSpec spec_;
  precision::Format format_;
  int margin_ = 0;
  bool delayed_ = false;
  const char *step_ = "", *column_step_ = "";  ///< step names; `column_step_` recomputes the column copy
  Slot row_, column_;  ///< (N, width + a row's share of block scales) u8: codes, then scales of blocks
  Slot scale_, amax_;  ///< (1, 1) f32: set if a whole tensor's scale is found from its own values
};

/// A weight of a layer and its GEMMs.
struct ProjectionSpec {
  int layer = 0;
  precision::Gemm gemm{};
  int weight = -1, bias = -1;   ///< parameters
  int64_t in = 0, out = 0;      ///< columns of x and y on this rank
  bool column = false;          ///< split by rows (ColumnInput), else by columns (RowOutput)
  bool gathers = false;         ///< gathers_fp8(): FP8 codes of x of a column input, of dy of a row output
  std::string_view rules = "";  ///< recompute rules of x
  /// The weight of experts, whose rows these are; must outlive the projection.
  const ExpertDispatch* experts = nullptr;
  /// wgrad reads x times weights of a router, which backward steps make (quantize_weighted()).
  bool weighted = false;
};

class Projection {
 public:
  Projection() = default;
  Projection(const precision::Recipe& recipe, const AddSlot& add, const ProjectionSpec& spec);

  /// Forward steps between those that write and read x; none if x is read as it is.
  void quantize_input(Run& r, const Source& x) const;
  /// Whether x itself is read by these steps only.
  bool quantizes_input() const { return static_cast<bool>(input_); }
  bool gathers() const { return spec_.gathers; }
  /// QuantizedOperand::amax() of x.
  Slot input_amax() const { return input_.amax(); }
  /// The slots that fprop reads for x.
  Reads input_reads(Slot x) const { return input_ ? input_.row_reads() : reads(x) | groups(); }
  Tensor input(const Run& r, Slot x) const { return input_ ? input_.row(r) : rows(r, x); }
  /// The weight as fprop reads it. Its FP8 copies are made here.
  Tensor weight(Run& r) const;
  /// The fprop GEMM without a bias, in a step with input_reads(x).
  void multiply(Run& r, Slot x, const Tensor& out) const;

  /// QuantizedOperand::amax() of dy.
  Slot gradient_amax() const { return gradient_.amax(); }
  /// True if dy need not be stored where it is the gradient of an activation: only the steps of
  /// quantize_gradient() read it, and they compute it as they round it.
  bool computes_gradient(bool gated) const {
    return gradient_ && spec_.bias < 0 && (!gated || ops::halves_scales(gradient_.scaling(), spec_.out / 2));
  }
  /// Dgrad steps between those that write and read dy; none if dy is read as it is.
  void quantize_gradient(Run& r, const Source& dy) const;
  /// Dgrad steps that round x times the router's weights, which wgrad reads.
  void quantize_weighted(Run& r, Slot x) const;
  /// The slots that dgrad reads for dy and for the weight.
  Reads gradient_reads(Slot dy) const {
    return gradient_ ? gradient_.row_reads() | reads(transposed_) : reads(dy) | groups();
  }
  Tensor gradient(const Run& r, Slot dy) const { return gradient_ ? gradient_.row(r) : rows(r, dy); }
  Tensor weight_for_gradient(const Run& r) const;
  /// The dgrad GEMM, in a step with gradient_reads(dy).
  void multiply_gradient(const Run& r, Slot dy, const Tensor& dx) const;

  /// The wgrad step, with the gradient of the bias; `before` is called first in it. `x`: the weighted one if
  /// there is one.
  void wgrad(Run& r, std::string_view name, Slot dy, Slot x, const std::function<void()>& before = {}) const;

 private:
  Reads groups() const;
  /// The rows of a slot that are in use.
  Tensor rows(const Run& r, Slot slot) const;
  void quantize_weight(Run& r) const;

  ProjectionSpec spec_;
  precision::Format format_;  ///< of the weight
  int margin_ = 0;
  QuantizedOperand input_, weighted_, gradient_;
  const char* transpose_ = "";
  Slot transposed_;  ///< (1, quantized_bytes()): the column copy of a weight that is kept in FP8
};

/// Adds the amax slot that the producer of `d_out` fills; it determines the FP8 scale of dy. Unset if the
/// GEMM does not need it, or reads a tensor made from d_out. `port`: another layer writes it.
Slot largest_gradient(const AddSlot& add, const Projection& projection, const RowOutput& output, Slot d_out,
                      bool port);

/// The groups of ranks that agree, one after the other, on the scale of x or dy found from its values: the
/// ranks with parts of a microbatch and, for experts' rows, the ranks that exchange tokens. `parts`:
/// tensor-parallel ranks have different columns or rows.
std::array<std::optional<parallel::GroupId>, 2> ranks_of_scale(const ModelLayout& layout, bool parts,
                                                               bool experts);
/// The ranks that have parts of a weight and agree on its scale.
std::optional<parallel::GroupId> ranks_of_weight_scale(const ModelLayout& layout, bool experts);

/// Bytes of one FP8 copy (rows, columns): codes, then scales of blocks.
int64_t quantized_bytes(Scaling scaling, int64_t rows, int64_t columns);
/// The copy in such memory, without a scale of the whole tensor.
Tensor quantized_tensor(void* data, const precision::Format& format, int64_t rows, int64_t columns,
                        Device device);

}  // namespace nrl::model
