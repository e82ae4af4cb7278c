#pragma once
// The FP8 copies of an operand of a GEMM, x or dy, and the steps that write them: before the forward GEMM for
// x, before dgrad for dy.
//
// With sequence parallelism the ranks have parts of the rows of x, or of dy. Where each rounds its own, the
// rounding step gathers the codes, which may arrive during the GEMM (gemm_overlap.h). The column copy is
// their transpose, made after it.
//
// Scales of whole tensors are found here: from the values (the ranks that share a tensor agree on them), or
// from earlier steps (DelayedScales). Recomputation rounds with the scales of the forward pass.

#include "apps/model/linear/fp8_state.h"
#include "apps/model/linear/grouped_rows.h"
#include "apps/model/linear/pre_norm.h"

namespace nrl::model {

/// An operand of a GEMM and its FP8 copies. Attention has row copies only; its backward pass reads them too.
struct QuantizedSpec {
  precision::Gemm gemm{};
  precision::Role role{};
  int64_t width = 0;
  bool divided = false;         ///< tensor-parallel ranks have different columns
  bool gathers = false;         ///< they have different rows, round them and gather the codes
  CommOverlap overlap = {};     ///< of this gather with the GEMM on the row copy
  std::string_view rules = "";  ///< recompute rules of the column copy
  std::string_view row_rules = "";
  bool row = true, column = true;
  bool generation = true;  ///< generation reads it
  /// The experts whose rows the operand holds; must outlive it. Null: the rows are tokens.
  const GroupedRows* groups = nullptr;
};

/// The ranks that must take experts' rows in the same number of rounds (Run::rounds()), because every round
/// finds scales over them; unset if the ranks of each exchange are enough, which do anyway.
std::optional<parallel::GroupId> ranks_of_rounds(const LayerBuilder& b);

/// The FP8 copies of x or dy.
class QuantizedValue {
 public:
  QuantizedValue() = default;  ///< no copies: the operand is read as it is
  QuantizedValue(const LayerBuilder& b, const QuantizedSpec& operand);
  explicit operator bool() const { return row_ || column_; }

  /// The steps that write the copies of `source`, before the GEMM on the row copy.
  void forward_steps(Run& r, const Value& source) const;
  void backward_step(Run& r, const Value& source) const;
  /// After it: the column copy of gathered codes.
  void forward_column_step(Run& r) const;
  void backward_column_step(Run& r) const;
  /// (1) f32: the amax from which the scale is found; if the source is a norm, the norm writes it. Unset if
  /// the scale is found otherwise.
  Slot amax() const { return amax_; }
  Scaling scaling() const { return format_.scaling; }
  /// Where codes arrive that are gathered; else unset.
  Slot gathered() const { return spec_.gathers ? row_ : Slot{}; }
  Reads row_reads() const { return reads(row_, scale_) | group_reads(); }
  Reads column_reads() const { return reads(column_, scale_) | group_reads(); }
  /// (N, width), and (width, N).
  Tensor row(const Run& r) const;
  Tensor column(const Run& r) const;

 private:
  ops::QuantizeSource values_of(const Run& r, const Value& s) const;
  Tensor offsets_of(const Run& r) const;
  Reads group_reads() const;
  Tensor with_scales(const Run& r, Tensor t) const;
  Reads reads_of(const Value& source) const;
  /// Returns the amax from which quantize() finds the scale; empty if it finds none from a whole tensor.
  Tensor measure(Run& r, const Value& source) const;
  void quantize(Run& r, const Value& source, bool row, bool column, const Tensor& measured = {}) const;
  /// Rounds this rank's rows and starts to gather the rows of all ranks.
  void gather(Run& r, const Value& source, const Tensor& measured) const;
  bool column_follows() const { return spec_.gathers && column_; }

  QuantizedSpec spec_;
  int layer_ = 0;
  precision::Format format_;
  int margin_ = 0;
  bool delayed_ = false;
  const char *step_ = "", *column_step_ = "";  ///< step names; `column_step_` recomputes the column copy
  Slot row_, column_;  ///< (N, width + a row's share of block scales) u8: codes, then scales of blocks
  Slot scale_, amax_;  ///< (1, 1) f32: set if a whole tensor's scale is found from its own values
};

}  // namespace nrl::model
