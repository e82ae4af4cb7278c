#include "tests/ops/reference/reference.h"

namespace nrl::ops::reference {
namespace {

/// The segment of a row that has a target, or -1.
int64_t segment_of(const Tensor& target, const Tensor& segment, int64_t row, int64_t segments) {
  const int64_t s = index(segment, row);
  return index(target, row) < 0 || s >= segments ? -1 : s;
}

void sums_of_segments(Exec&, const SegmentSum& a) {
  for (int64_t s = 0; s < a.out.dim(0); ++s) {
    double sum = 0;
    for (int64_t n = 0; n < a.x.dim(0); ++n)
      if (segment_of(a.target, a.segment, n, a.out.dim(0)) == s)
        sum += load(a.x, n) - (a.minus ? load(a.minus, n) : 0.0);
    store(a.out, s, sum);
  }
}

void rows_of_segments(Exec&, const SegmentRows& a) {
  for (int64_t n = 0; n < a.out.dim(0); ++n) {
    const int64_t s = segment_of(a.target, a.segment, n, a.values.dim(0));
    store(a.out, n, s < 0 ? 0.0 : load(a.values, s));
  }
}

}  // namespace

void fill_segments(KernelTable& table) {
  table.segment_sum = sums_of_segments;
  table.segment_rows = rows_of_segments;
}

}  // namespace nrl::ops::reference
