#pragma once
// Linear layers of E experts: each is applied to its own rows. The rows of expert e are [offsets[e],
// offsets[e + 1]) of x and out; rows from offsets[E] on are neither read nor written. The offsets are read on
// the device, so that the host need not wait for them.
//
// x (R, K), weight (E M, K): the stacked expert matrices [out, in], out (R, M). f32, bf16 or f16, one dtype
// for all but dweight; bf16 and f16 are storage: sums are accumulated in f32 and rounded once at the end.
//
// Both operands may be FP8, in the copies that linear.h names and by groups as quantize() makes them: x (P,
// K) and dout (P, M), transposed (K, P) and (M, P), P >= grouped_rows(R, E, unit). The copies of the weight
// stack the copies of the experts: (E M, K), transposed (E K, M). weight and x are e4m3, dout is e4m3 or
// e5m2. out and dx have R rows in bf16, on a CPU also in f32. A CPU upcasts the operands to f32. A GPU
// multiplies them on tensor cores, with scales of tensors, row128 with row128 or block128 on 9.0, or mx32
// from 10.0 on, else refuses (Exit::unavailable when kernels are collected).

#include "core/ops/exec.h"
#include "core/ops/linear.h"

namespace nrl::ops {

/// out = x W_e^T.
struct GroupedLinearForward {
  Tensor x;        ///< (R, K); in FP8 (P, K)
  Tensor weight;   ///< (E M, K)
  Tensor offsets;  ///< (E + 1) i32, ascending from 0
  Tensor out;      ///< (R, M)
};

/// dx = dout W_e.
struct GroupedLinearBackwardData {
  Tensor dout;     ///< (R, M); in FP8 (P, M)
  Tensor weight;   ///< (E M, K); in FP8 (E K, M)
  Tensor offsets;  ///< (E + 1) i32
  Tensor dx;       ///< (R, K)
};

/// dweight_e = dout_e^T x_e (accumulate: +=). Experts without rows get 0.
struct GroupedLinearBackwardWeight {
  Tensor dout;     ///< (R, M); in FP8 (M, P)
  Tensor x;        ///< (R, K); in FP8 (K, P)
  Tensor offsets;  ///< (E + 1) i32
  Tensor dweight;  ///< (E M, K) f32, contiguous
  bool accumulate = true;
};

void grouped_linear_forward(Exec& exec, const GroupedLinearForward& a);
void grouped_linear_backward_data(Exec& exec, const GroupedLinearBackwardData& a);
void grouped_linear_backward_weight(Exec& exec, const GroupedLinearBackwardWeight& a);
/// The cost of all R rows.
Cost cost(const Exec& exec, const GroupedLinearForward& a);
Cost cost(const Exec& exec, const GroupedLinearBackwardData& a);
Cost cost(const Exec& exec, const GroupedLinearBackwardWeight& a);
/// The workspace for the case that one expert has all rows. A GPU takes none.
size_t workspace(const Exec& exec, const GroupedLinearForward& a);
size_t workspace(const Exec& exec, const GroupedLinearBackwardData& a);
size_t workspace(const Exec& exec, const GroupedLinearBackwardWeight& a);

/// Scratch bytes of any of the three on a CPU for experts (m, k) and n rows.
size_t grouped_linear_workspace(int64_t n, int64_t m, int64_t k, DType dtype, int threads,
                                Bf16Products products);

}  // namespace nrl::ops
