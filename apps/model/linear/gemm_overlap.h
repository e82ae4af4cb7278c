#pragma once
// GEMMs whose input tensor-parallel ranks gather, or whose output they sum, overlapped with this
// communication (distributed.tp_comm_overlap). Of n rows on each of t ranks:
//
//              all-gather, then GEMM                        GEMM, then reduce-scatter
//   none,      one collective, one GEMM                     one GEMM, one collective
//   bulk
//   pipelined  the GEMM on a rank's own rows, then on       a piece of every rank's rows is summed during the
//              pieces of the others', which all send to     GEMM on the next piece; without sequence
//              all and which arrive meanwhile               parallelism by all-reduces
//   ring       the GEMM on one rank's rows after another,   the GEMM on one rank's rows after another, which
//              while the next arrive from the neighbor      adds to a sum that travels around the ring
//
// A reduce-scatter adds in rank order and gives the same bits as without overlap. The ring adds from the rank
// after the owner to the owner; in bf16 each hop rounds, where a collective rounds once. A GEMM library may
// compute a row differently in GEMMs of different sizes, in its last bits.

#include <functional>
#include <vector>

#include "apps/model/program/layer.h"

namespace nrl::model {

/// Rows of a GEMM: [in, in + count) of its input become [out, out + count) of its output.
struct GemmRows {
  int64_t in = 0, count = 0, out = 0;
  Tensor input(const Tensor& t) const { return t.rows(in, count); }
  /// Empty for an empty tensor.
  Tensor output(const Tensor& t) const { return t ? t.rows(out, count) : t; }
};
using GemmOfRows = std::function<void(const GemmRows&)>;

/// In the step that writes `all` (N, H): starts to gather the ranks' `own` (n, H). Without overlap it ends
/// here.
void start_gather(const Run& r, const CommOverlap& overlap, Slot own, Slot all);
/// The same where this rank's rows are in `all` already, except that rows which are gathered again have all
/// arrived when it returns.
void start_gather_in_place(const Run& r, const CommOverlap& overlap, Slot all);
/// In the first step of a pass that reads `all`: calls `gemm` for all of its `rows` as they arrive. They may
/// be a copy of the slot's in another format, which was made when all had arrived.
void multiply_gathered(const Run& r, const CommOverlap& overlap, Slot all, const Tensor& rows,
                       const GemmOfRows& gemm);
/// Waits for the operations that write the slot.
void wait_for(const Run& r, Slot slot);
/// Calls `gemm` for `rows` rows of its input, which it writes to `partial` (N, H), and sums over the ranks:
/// `out` (n, H) gets this rank's rows of the sum, or if it is `partial` all rows.
void multiply_and_sum(const Run& r, const CommOverlap& overlap, Slot partial, Slot out,
                      const GemmOfRows& gemm);

}  // namespace nrl::model
