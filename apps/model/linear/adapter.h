#pragma once
// The low-rank adapter of a weight (AdapterSpec): y += s drop(x) A^T B^T in the steps of the weight's GEMMs,
// with r columns for each of P modules that a fused weight consists of:
//
//   forward   u = s drop(x) A^T          y  += u B^T, a module's columns of u for its columns of y
//   dgrad     du = s dy B                dx += drop(du A), with the mask of the forward pass
//   wgrad     dB = dy^T u                dA = du^T drop(x)
//
// u is linear in x, and du in dy. So where tensor-parallel ranks split the outputs, du is a part of a sum,
// and so is what it adds to dx, which the ranks sum anyway; where they split the inputs, u and y are. No rank
// sends anything for the adapter. One of A and B has copies, each with a part of the gradient's sum.

#include "apps/model/linear/gemm_overlap.h"
#include "apps/model/program/layer.h"

namespace nrl::model {

class Adapter {
 public:
  Adapter() = default;  ///< none
  /// `in`: columns of x on this rank, which has those from `first_in` on of `all_in`. `stream`: distinguishes
  /// the dropout masks of a layer's weights. `rules`: recompute rules of x.
  struct Shape {
    int64_t in = 0, first_in = 0, all_in = 0;
    int stream = 0;
    std::string_view rules = "";
  };
  Adapter(const LayerBuilder& b, const char* name, const AdapterParameters& parameters, const Shape& shape);
  explicit operator bool() const { return static_cast<bool>(parameters_); }

  /// The step before the weight's: drops x. Nothing without dropout. `ready` is called before x is read.
  void drop(Run& r, Slot x, const std::function<void()>& ready) const;
  /// The forward step also reads these slots, and writes u().
  Reads forward_reads(Slot x) const { return reads(dropped_ ? dropped_ : x); }
  Slot u() const { return u_; }
  /// In the forward step, after the weight's GEMM of these rows of `x` and `y`.
  void add(const Run& r, Slot x, const Tensor& y, const GemmRows& rows) const;

  /// The dgrad step also writes these slots.
  memory::SlotSet gradients() const { return d_u_.bit() | d_dropped_.bit(); }
  /// In the dgrad step, after the weight's GEMM of these rows of `dy` and `dx`.
  void add_gradient(const Run& r, const Tensor& dy, const Tensor& dx, const GemmRows& rows) const;

  /// True if wgrad reads x itself.
  bool keeps_x() const { return *this && !dropped_; }
  /// The wgrad step. `ready` is called in it before x is read.
  void wgrad(Run& r, Slot x, Slot dy, const std::function<void()>& ready) const;

 private:
  /// The columns of a module in u or du.
  Tensor of_module(const Tensor& t, int64_t module) const { return t.columns(module * rank_, rank_); }
  /// B's rows of a piece.
  template <class F>
  void for_each_piece(const Tensor& b, F&& work) const;
  /// `out` = x dropped, or dropped + `residual`.
  void apply_dropout(const Run& r, const Tensor& x, const Tensor& residual, const Tensor& out,
                     int64_t first_row) const;

  AdapterParameters parameters_;
  Shape shape_;
  int layer_ = 0;
  int64_t rank_ = 0;
  float scale_ = 1, dropout_ = 0;
  const char *name_ = "", *drop_name_ = "";
  Slot u_, d_u_;              ///< (N, P r)
  Slot dropped_, d_dropped_;  ///< (N, in); unset without dropout
};

}  // namespace nrl::model
