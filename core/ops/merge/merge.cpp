#include "core/ops/merge.h"

#include "core/ops/shared/check.h"
#include "core/ops/traced.h"

namespace nrl::ops {
namespace {

void check_lse(const char* name, const Tensor& lse, const Tensor& out) {
  NRL_CHECK((lse.data || lse.numel() == 0) && lse.rank == 2 && lse.dtype == DType::f32 && dense_rows(lse) &&
                lse.dim(0) == out.dim(1) && lse.dim(1) == out.dim(0),
            "merge_attention: {} is {}, wanted f32[{}, {}]", name, describe(lse), out.dim(1), out.dim(0));
}

}  // namespace

Cost cost(const Exec&, const AddRows& a) {
  return {.read = bytes_of(a.x) + (a.accumulate ? bytes_of(a.out) : 0.0), .written = bytes_of(a.out)};
}

Cost cost(const Exec&, const MergeAttention& a) {
  return {.read = bytes_of(a.part, a.part_lse, a.out, a.lse), .written = bytes_of(a.out, a.lse)};
}

void add_rows(Exec& exec, const AddRows& a) {
  if (noted(exec, Kernel::add_rows, a)) return;
  NRL_CHECK((a.x.data || a.x.numel() == 0) && a.x.rank == 2 && is_float(a.x) && dense_rows(a.x),
            "add_rows: x is {}, wanted f32, bf16 or f16 (N, W)", describe(a.x));
  NRL_CHECK(
      (a.out.data || a.out.numel() == 0) && same_shape(a.out, a.x) && is_float(a.out) && dense_rows(a.out),
      "add_rows: out is {}, x is {}", describe(a.out), describe(a.x));
  NRL_CHECK(a.out.data != a.x.data && same_or_disjoint(a.out, a.x), "add_rows: out overlaps x");
  const trace::Range range = traced(exec, Kernel::add_rows, a);
  if (a.x.numel() > 0) exec.kernels->add_rows(exec, a);
}

void merge_attention(Exec& exec, const MergeAttention& a) {
  if (noted(exec, Kernel::merge_attention, a)) return;
  NRL_CHECK(
      (a.part.data || a.part.numel() == 0) && a.part.rank == 3 && is_float(a.part) && dense_rows(a.part),
      "merge_attention: part is {}, wanted f32, bf16 or f16 (N, heads, D)", describe(a.part));
  NRL_CHECK((a.out.data || a.out.numel() == 0) && same_shape(a.out, a.part) && a.out.dtype == DType::f32 &&
                a.out.scales.kind == Scaling::none && dense_rows(a.out),
            "merge_attention: out is {}, part is {}, wanted f32", describe(a.out), describe(a.part));
  check_lse("part_lse", a.part_lse, a.part);
  check_lse("lse", a.lse, a.part);
  NRL_CHECK(a.out.data != a.part.data && a.lse.data != a.part_lse.data && same_or_disjoint(a.out, a.part) &&
                same_or_disjoint(a.lse, a.part_lse),
            "merge_attention: the part overlaps the result");
  const trace::Range range = traced(exec, Kernel::merge_attention, a);
  if (a.part.numel() > 0) exec.kernels->merge_attention(exec, a);
}

}  // namespace nrl::ops
