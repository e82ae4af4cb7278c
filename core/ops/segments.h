#pragma once
// Sums over the rows of each sequence of a microbatch, and weights of rows that depend on their sequence.

#include "core/ops/exec.h"

namespace nrl::ops {

/// out[s] = sum of x[n] - minus[n] over the rows n of segment s that have a target. In f64 and in an order
/// that depends on the rows of the segment only, not on their places, so that a sequence's sum does not
/// change with its neighbors; nor with the number of threads. Segments without such rows get 0.
struct SegmentSum {
  Tensor x;           ///< (N) f32
  Tensor minus = {};  ///< optional (N) f32
  Tensor target;      ///< (N) i32; < 0: no target
  Tensor
      segment;  ///< (N) i32, the row's segment, 0 .. S - 1; others: none. Rows of a segment need not adjoin
  Tensor out;   ///< (S) f64, overwritten
};
void segment_sum(Exec& exec, const SegmentSum& a);
Cost cost(const Exec& exec, const SegmentSum& a);

/// out[n] = values[segment[n]], rounded to f32; 0 for rows without a target or a segment.
struct SegmentRows {
  Tensor values;   ///< (S) f64
  Tensor target;   ///< (N) i32
  Tensor segment;  ///< (N) i32
  Tensor out;      ///< (N) f32, overwritten
};
void segment_rows(Exec& exec, const SegmentRows& a);
Cost cost(const Exec& exec, const SegmentRows& a);

}  // namespace nrl::ops
