#include "core/ops/segments.h"

#include "core/ops/shared/check.h"
#include "core/ops/traced.h"

namespace nrl::ops {
namespace {

void check_numbers(const char* op, const char* name, const Tensor& t, int64_t n, DType dtype) {
  NRL_CHECK(n == 0 ? t.numel() == 0 && t.dtype == dtype : is_vector(t, n, dtype),
            "{}: {} is {}, wanted {}[{}]", op, name, describe(t), name_of(dtype), n);
}

}  // namespace

Cost cost(const Exec&, const SegmentSum& a) {
  return {.read = bytes_of(a.x, a.minus, a.target, a.segment), .written = bytes_of(a.out)};
}

Cost cost(const Exec&, const SegmentRows& a) {
  return {.read = bytes_of(a.values, a.target, a.segment), .written = bytes_of(a.out)};
}

void segment_sum(Exec& exec, const SegmentSum& a) {
  if (noted(exec, Kernel::segment_sum, a)) return;
  constexpr const char* op = "segment_sum";
  const int64_t n = a.x.numel();
  check_numbers(op, "x", a.x, n, DType::f32);
  if (a.minus) check_numbers(op, "minus", a.minus, n, DType::f32);
  check_numbers(op, "target", a.target, n, DType::i32);
  check_numbers(op, "segment", a.segment, n, DType::i32);
  check_numbers(op, "out", a.out, a.out.numel(), DType::f64);
  const trace::Range range = traced(exec, Kernel::segment_sum, a);
  if (a.out.numel() > 0) exec.kernels->segment_sum(exec, a);
}

void segment_rows(Exec& exec, const SegmentRows& a) {
  if (noted(exec, Kernel::segment_rows, a)) return;
  constexpr const char* op = "segment_rows";
  const int64_t n = a.out.numel();
  check_numbers(op, "values", a.values, a.values.numel(), DType::f64);
  check_numbers(op, "target", a.target, n, DType::i32);
  check_numbers(op, "segment", a.segment, n, DType::i32);
  check_numbers(op, "out", a.out, n, DType::f32);
  const trace::Range range = traced(exec, Kernel::segment_rows, a);
  if (n > 0) exec.kernels->segment_rows(exec, a);
}

}  // namespace nrl::ops
