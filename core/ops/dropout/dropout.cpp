#include "core/ops/dropout.h"

#include <climits>
#include <cstdint>

#include "core/ops/shared/check.h"
#include "core/ops/traced.h"

namespace nrl::ops {

Cost cost(const Exec&, const Dropout& a) {
  return {.read = bytes_of(a.x, a.residual, a.rows), .written = bytes_of(a.out)};
}

void dropout(Exec& exec, const Dropout& a) {
  if (noted(exec, Kernel::dropout, a)) return;
  NRL_CHECK(a.x.data && a.x.rank == 2 && is_float(a.x) && dense_rows(a.x),
            "dropout: x is {}, wanted f32, bf16 or f16 (N, H)", describe(a.x));
  NRL_CHECK(a.out.data && same_shape(a.out, a.x) && a.out.dtype == a.x.dtype && dense_rows(a.out),
            "dropout: out is {}, x is {}", describe(a.out), describe(a.x));
  NRL_CHECK(same_or_disjoint(a.out, a.x), "dropout: out overlaps x partly");
  if (a.residual) {
    NRL_CHECK(same_shape(a.residual, a.x) && a.residual.dtype == a.x.dtype && dense_rows(a.residual),
              "dropout: residual is {}, x is {}", describe(a.residual), describe(a.x));
    NRL_CHECK(same_or_disjoint(a.out, a.residual), "dropout: out overlaps residual partly");
  }
  NRL_CHECK(a.p >= 0.0f && a.p < 1.0f && a.first_row >= 0, "dropout: p {}, first_row {}", a.p, a.first_row);
  NRL_CHECK(
      a.width == 0 ? a.first_column == 0 : a.first_column >= 0 && a.first_column + a.x.dim(1) <= a.width,
      "dropout: columns from {} on of rows of {}, x is {}", a.first_column, a.width, describe(a.x));
  NRL_CHECK(!a.step || is_vector(a.step, 1, DType::i64), "dropout: step is {}, wanted i64[1]",
            describe(a.step));
  NRL_CHECK(!a.rows || is_vector(a.rows, a.x.dim(0), DType::i32), "dropout: rows are {}, x is {}",
            describe(a.rows), describe(a.x));
  // A GPU counts packs of 16 bytes, or elements where rows are not aligned, in 32 bits.
  const auto aligned = [](const Tensor& t) {
    const auto row = static_cast<uintptr_t>(t.step(0) * size_of(t.dtype));
    return !t || (reinterpret_cast<uintptr_t>(t.data) | row) % 16 == 0;
  };
  const int64_t pack = aligned(a.x) && aligned(a.out) && aligned(a.residual) ? 16 / size_of(a.x.dtype) : 1;
  NRL_CHECK(
      !exec.libraries || a.x.numel() / pack <= INT_MAX - 4096,
      "dropout: x is {}, a GPU takes fewer than 2^31 packs of 16 bytes (elements, if rows are not aligned)",
      describe(a.x));
  const trace::Range range = traced(exec, Kernel::dropout, a);
  if (a.x.numel() > 0) exec.kernels->dropout(exec, a);
}

void check_dropout(const char* op, const FusedDropout& a, int64_t rows) {
  NRL_CHECK(a.p >= 0.0f && a.p < 1.0f && a.first_row >= 0, "{}: dropout p {}, first_row {}", op, a.p,
            a.first_row);
  NRL_CHECK(!a.step || is_vector(a.step, 1, DType::i64), "{}: step is {}, wanted i64[1]", op,
            describe(a.step));
  NRL_CHECK(!a.rows || is_vector(a.rows, rows, DType::i32), "{}: rows of dropout are {}, wanted i32[{}]", op,
            describe(a.rows), rows);
}

}  // namespace nrl::ops
