#include "core/ops/check.h"
#include "core/ops/kernel_table.h"
#include "core/ops/linear/linear.h"
#include "core/ops/scratch.h"
#include "core/trace/trace.h"

namespace nrl::ops {

void column_sums(Exec& exec, const ColumnSums& a) {
  NRL_CHECK(a.x.rank == 2 && (a.x.data || a.x.numel() == 0) && is_float(a.x) && dense_rows(a.x),
            "column_sums: x is {}, wanted f32 or bf16 (N, M) with contiguous columns", describe(a.x));
  const int64_t n = a.x.dim(0), m = a.x.dim(1);
  NRL_CHECK(is_vector(a.out, m, DType::f32) || m == 0, "column_sums: out is {}, x is {}", describe(a.out),
            describe(a.x));
  const trace::Range range("column_sums");
  if (m > 0 && (n > 0 || !a.accumulate)) exec.kernels->column_sums(exec, a);
}

size_t column_sums_workspace(int64_t m, int threads) {
  return scratch_bytes(threads * m) + scratch_alignment;
}

}  // namespace nrl::ops
