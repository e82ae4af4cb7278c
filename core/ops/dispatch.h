#pragma once
// Token dispatch of a mixture of experts: rows are copied to the experts in the order of experts and back.
//
// N tokens with k choices each, E experts. Choice c of token t is entry t k + c. R dispatched rows: expert e
// has rows [offsets[e], offsets[e + 1]), in the order of their entries.

#include "core/ops/exec.h"

namespace nrl::ops {

/// Sorts the entries by expert (stable). With a capacity an expert keeps that many of its entries only.
struct DispatchSort {
  /// (N, k) i32, distinct within a token; an expert outside [first, first + E) drops the entry.
  Tensor expert;
  int64_t first = 0;     ///< the number of the first of the E experts
  Tensor prob = {};      ///< (N, k) f32: keep the most probable entries (of equals the first); else the first
  int64_t capacity = 0;  ///< entries per expert; 0: all
  bool pad = false;      ///< with a capacity: every expert has `capacity` rows, the last of them empty
  Tensor offsets;        ///< (E + 1) i32
  Tensor row;            ///< (N, k) i32: the row of an entry; -1: dropped
  Tensor source;         ///< (R) i32: the entry of a row; -1: none. R >= the rows of all experts, which
                         ///< without a capacity are at most N min(k, E)
};

/// out[r] = x[source[r] / k], or 0 where the row has no entry.
struct Permute {
  Tensor x;       ///< (N, H) f32, bf16 or f16
  Tensor source;  ///< (R) i32
  int64_t top_k;  ///< k
  Tensor out;     ///< (R, H)
};

/// Moves contiguous groups of rows. One side is packed: group g has rows [begin[g], begin[g + 1]) there. On
/// the other side its rows begin at place[g].
struct RegroupRows {
  Tensor x;                ///< (R, H) f32, bf16 or f16, R = begin[C]
  Tensor begin;            ///< (C + 1) i32, ascending from 0
  Tensor place;            ///< (C) i32: placed groups must not overlap
  bool placed_in = false;  ///< `place` refers to rows of x, else of out
  Tensor out;              ///< (R, H); may not overlap x
};

/// out[t] = (addend[t] +) sum over c of prob[t, c] * x[row[t, c]], in f32 in the order of c. Without prob the
/// weights are 1: the gradient of Permute.
struct Unpermute {
  Tensor x;            ///< (R, H) f32, bf16 or f16
  Tensor row = {};     ///< (N, k) i32; absent: entry i has row i
  Tensor prob = {};    ///< optional (N, k) f32; required without row
  Tensor addend = {};  ///< optional (N, H); may be out
  Tensor out;          ///< (N, H)
};

/// Backward pass of the weights that Unpermute applies after a GEMM, computed at the input of that GEMM: with
/// y = act W^T unweighted and dact = dy W for the gradient dy of an unweighted output,
///   dprob[entry] = dact[row] . act[row], 0 where dropped
///   dact_out[row] = prob[entry] * dact[row]
///   act_out[row] = prob[entry] * act[row], the input of the weight gradient dy^T act_out
/// so that y need not be kept. Rows without an entry are not written.
struct GateBackward {
  Tensor dact;      ///< (R, F) f32, bf16 or f16
  Tensor act;       ///< (R, F)
  Tensor prob;      ///< (N, k) f32
  Tensor row = {};  ///< (N, k) i32; absent: entry i has row i
  Tensor dprob;     ///< (N, k) f32
  Tensor dact_out;  ///< (R, F); may be dact
  Tensor act_out;   ///< (R, F); may be act
};

void dispatch_sort(Exec& exec, const DispatchSort& a);
void permute(Exec& exec, const Permute& a);
void regroup_rows(Exec& exec, const RegroupRows& a);
void unpermute(Exec& exec, const Unpermute& a);
void gate_backward(Exec& exec, const GateBackward& a);
Cost cost(const Exec& exec, const DispatchSort& a);
Cost cost(const Exec& exec, const Permute& a);
Cost cost(const Exec& exec, const RegroupRows& a);
Cost cost(const Exec& exec, const Unpermute& a);
Cost cost(const Exec& exec, const GateBackward& a);

}  // namespace nrl::ops
