#pragma once
// A weight in a layer: y = x W^T + b and its gradients, in the formats of the recipe and divided over the
// ranks of the layout. A linear layer owns all steps between the slots x and y, and between their gradients:
//
//   forward   gather x over the ranks, round it to FP8, and a weight that is not cached, GEMM, sum y over the
//             ranks
//   dgrad     gather dy, round it, transpose a weight that is kept in FP8 or round one that is not cached,
//             GEMM, sum dx over the ranks
//   wgrad     GEMM, gradient of the bias; not of a frozen weight
//
// A weight may have an adapter (adapter.h), which adds to y and dx and has a wgrad step of its own.
//
// Each of them only where the layout and the recipe need it: the layer that has the weight does not ask.
// With FP8 operands GEMMs read the copies of quantized_value.h:
//
//            reads                                  kept for backward
//   fprop    x row copy,  W row copy                x column copy
//   dgrad    dy row copy, W column copy
//   wgrad    dy column copy, x column copy
//
// A weight that is kept in FP8 is its row copy.
//
// The weight may hold all experts of a layer, and each expert multiplies its own rows
// (core/ops/grouped_linear.h). The experts are one parameter, their rows one tensor, and either has one scale
// if it is scaled as a whole.

#include <optional>

#include "apps/model/linear/adapter.h"
#include "apps/model/linear/quantized_value.h"
#include "apps/model/linear/tensor_parallel.h"

namespace nrl::model {

/// The dimension of a weight (out, in) that tensor-parallel ranks split.
enum class Split : uint8_t { outputs, inputs };

struct LinearSpec {
  const char* name = "";  ///< of its steps
  precision::Gemm gemm{};
  int weight = -1, bias = -1;      ///< parameters
  AdapterParameters adapter = {};  ///< not with `groups`
  int64_t in = 0, out = 0;         ///< columns of x and y on this rank
  Split split = Split::outputs;
  std::string_view rules = "";  ///< recompute rules of x
  /// The weight of experts, whose rows these are; must outlive the layer. No rank splits the experts' rows.
  const GroupedRows* groups = nullptr;
  bool weighted = false;  ///< wgrad reads x times weights of a router (LinearEnds::weighted)
  bool shares_x = false;  ///< another op reads x of all ranks
  bool overlaps = true;   ///< communication overlaps GEMMs where the layout says so
};

/// The slots between which a linear layer lies. N rows of the microbatch, n of them on this rank. With
/// Split::outputs x and d_x are (n, in), else y and d_y (n, out); the others have all N rows.
struct LinearEnds {
  Slot x = {}, y = {};      ///< x: unset where it is not stored (reads_x())
  Slot d_y = {}, d_x = {};  ///< d_y: unset where it is not stored (computes_d_y())
  Slot weighted = {};       ///< (N, in), written before wgrad
  /// An activation in the epilogues of the GEMMs (fuses_activation()): y is the activation of a slot, which
  /// the GEMM writes as well, or d_x the gradient of such a slot.
  struct Fused {
    ops::Activation activation = ops::Activation::none;
    Slot pre_activation = {};
  };
  Fused y_of = {}, d_x_of = {};
};

/// True for the steps that copy a weight in FP8 for one GEMM: in every microbatch the same copy.
bool copies_weight(std::string_view step);

/// Work of another op in the dgrad step: it reads these slots and adds to Linear::d_x() before the ranks sum
/// it.
struct MoreGradient {
  Reads reads = {};
  std::function<void()> work = {};
};

class Linear {
 public:
  Linear() = default;
  /// Adds the FP8 copies.
  Linear(const LayerBuilder& b, const LinearSpec& spec);
  /// Adds what lies between the ends. Must be called before the steps.
  void connect(const LayerBuilder& b, const LinearEnds& ends);

  // Neighbors ask these: they need not store some slots, and may compute an amax.
  /// False if x need not be a slot: only the steps that round it read it.
  bool reads_x() const { return !input_ || gathers_rows_of_x_ || adapter_; }
  /// True if d_y need not be a slot where it is the gradient of an activation: only the steps that round it
  /// read it, and they compute it.
  bool computes_d_y(bool gated) const;
  /// True if GEMMs can compute an activation in their epilogues.
  bool fuses_activation() const { return !input_ && !adapter_; }
  /// QuantizedValue::amax() of x and of d_y; unset if no producer is needed for them.
  Slot x_amax() const { return input_.amax(); }
  Slot d_y_amax() const { return gradient_.amax(); }
  /// True if the producer of `d_out` may find the amax of d_y: they are one tensor.
  bool measures(Slot d_out) const { return d_y_amax() && d_y().id == d_out.id; }

  /// Slots with the rows of all tensor-parallel ranks, for other ops that read x or add to its gradient
  /// (LinearSpec::shares_x).
  Slot x() const { return column_ ? column_->x : ends_.x; }
  Slot d_x() const { return column_ ? column_->d_x : ends_.d_x; }

  /// The steps of y. `x`: ends.x, or what computes it.
  void forward(Run& r, const Value& x) const;
  /// The steps of d_x. `d_y`: ends.d_y, perhaps with its amax, or what computes it.
  void dgrad(Run& r, const Value& d_y, const MoreGradient& more = {}) const;
  /// The steps of the gradients of weight and bias. They follow dgrad().
  void wgrad(Run& r) const;
  void backward(Run& r, const Value& d_y) const {
    dgrad(r, d_y);
    wgrad(r);
  }

 private:
  Slot d_y() const { return row_ ? row_->d_full : ends_.d_y; }
  /// The step of the gradients of weight and bias.
  void base_wgrad(Run& r) const;
  Reads groups() const { return spec_.groups ? reads(spec_.groups->offsets) : Reads{}; }
  /// The operands as GEMMs read them.
  Tensor input(const Run& r) const;
  Tensor gradient(const Run& r) const;
  /// The weight as fprop reads it. FP8 copies that are cached are made here.
  Tensor weight(Run& r) const;
  Tensor weight_for_gradient(const Run& r) const;
  /// Makes these of the weight's FP8 copies. `scale`: finds its scale, or its magnitude for later ones,
  /// first.
  void quantize_weight(Run& r, Tensor row, Tensor column, bool scale) const;
  /// FP8 copies of the weight in slots.
  Tensor row_copy(const Run& r) const;
  Tensor column_copy(const Run& r) const;
  Tensor copy_in(const Run& r, Slot slot, int64_t rows, int64_t columns) const;
  /// Matrices below each other in the weight and in both copies.
  int64_t experts() const;

  LinearSpec spec_;
  LinearEnds ends_;
  bool trains_weight_ = true, trains_bias_ = true;
  Adapter adapter_;
  int layer_ = 0;
  bool gathers_codes_ = false;      ///< of x with Split::outputs, else of d_y
  bool gathers_rows_of_x_ = false;  ///< as they are, with sequence parallelism
  const char* fused_name_ = "";
  precision::Format format_;  ///< of the weight
  int margin_ = 0;
  std::optional<ColumnInput> column_;  ///< Split::outputs
  std::optional<RowOutput> row_;       ///< Split::inputs
  QuantizedValue input_, weighted_, gradient_;
  const char *round_ = "", *transpose_ = "";
  /// (1, quantized_bytes()): the copies of a weight that are not cached, each for its GEMM; of one that is
  /// kept in FP8 the column copy.
  Slot rounded_, transposed_;
};

}  // namespace nrl::model
