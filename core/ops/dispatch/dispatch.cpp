#include "core/ops/dispatch.h"

#include <algorithm>

#include "core/ops/router.h"
#include "core/ops/shared/check.h"
#include "core/ops/traced.h"

namespace nrl::ops {
namespace {

bool is_matrix(const Tensor& t, int64_t rows, int64_t columns, DType dtype) {
  return (t.data || rows * columns == 0) && t.rank == 2 && t.dim(0) == rows && t.dim(1) == columns &&
         t.dtype == dtype;
}

void check_entries(const char* op, const char* name, const Tensor& t, int64_t n, int64_t k, DType dtype) {
  NRL_CHECK(is_matrix(t, n, k, dtype) && t.contiguous(), "{}: {} is {}, wanted contiguous {}[{}, {}]", op,
            name, describe(t), name_of(dtype), n, k);
}

void check_rows(const char* op, const char* name, const Tensor& t, int64_t rows, int64_t columns,
                DType dtype) {
  NRL_CHECK(is_matrix(t, rows, columns, dtype) && is_float(t) && dense_rows(t),
            "{}: {} is {}, wanted {}[{}, {}] with contiguous columns", op, name, describe(t), name_of(dtype),
            rows, columns);
}

}  // namespace

Cost cost(const Exec&, const DispatchSort& a) {
  return {.read = bytes_of(a.expert, a.capacity > 0 ? a.prob : Tensor{}),
          .written = bytes_of(a.offsets, a.row, a.source),
          .launches = 2};
}

Cost cost(const Exec&, const Permute& a) {
  return {.read = bytes_of(a.x, a.source), .written = bytes_of(a.out)};
}

Cost cost(const Exec&, const RegroupRows& a) {
  return {.read = bytes_of(a.x, a.begin, a.place), .written = bytes_of(a.out)};
}

Cost cost(const Exec&, const Unpermute& a) {
  return {.read = bytes_of(a.x, a.row, a.prob, a.addend), .written = bytes_of(a.out)};
}

Cost cost(const Exec&, const GateBackward& a) {
  return {.read = bytes_of(a.dact, a.act, a.prob, a.row),
          .written = bytes_of(a.dprob, a.dact_out, a.act_out)};
}

void dispatch_sort(Exec& exec, const DispatchSort& a) {
  if (noted(exec, Kernel::dispatch_sort, a)) return;
  constexpr const char* op = "dispatch_sort";
  NRL_CHECK(a.expert.rank == 2 && a.offsets.rank == 1 && a.source.rank == 1, "{}: expert is {}, offsets {}",
            op, describe(a.expert), describe(a.offsets));
  const int64_t n = a.expert.dim(0), k = a.expert.dim(1), experts = a.offsets.dim(0) - 1;
  check_entries(op, "expert", a.expert, n, k, DType::i32);
  check_entries(op, "row", a.row, n, k, DType::i32);
  if (a.prob) check_entries(op, "prob", a.prob, n, k, DType::f32);
  NRL_CHECK(is_vector(a.offsets, experts + 1, DType::i32) && experts >= 1 && experts <= max_experts,
            "{}: offsets are {}", op, describe(a.offsets));
  NRL_CHECK(a.capacity >= 0 && (a.capacity > 0 || !a.pad), "{}: capacity {}", op, a.capacity);
  NRL_CHECK(a.first >= 0 && a.first + experts <= max_experts, "{}: experts from {}", op, a.first);
  NRL_CHECK(is_vector(a.source, a.source.dim(0), DType::i32) &&
                a.source.dim(0) >= (a.pad ? experts * a.capacity : n * std::min(k, experts)),
            "{}: source is {} for {} entries", op, describe(a.source), n * k);
  const trace::Range range = traced(exec, Kernel::dispatch_sort, a);
  exec.kernels->dispatch_sort(exec, a);
}

void permute(Exec& exec, const Permute& a) {
  if (noted(exec, Kernel::permute, a)) return;
  constexpr const char* op = "permute";
  NRL_CHECK(a.x.rank == 2 && a.source.rank == 1 && a.top_k >= 1, "{}: x is {}, source is {}", op,
            describe(a.x), describe(a.source));
  const int64_t rows = a.source.dim(0);
  check_rows(op, "x", a.x, a.x.dim(0), a.x.dim(1), a.x.dtype);
  check_rows(op, "out", a.out, rows, a.x.dim(1), a.x.dtype);
  NRL_CHECK(is_vector(a.source, rows, DType::i32), "{}: source is {}", op, describe(a.source));
  const trace::Range range = traced(exec, Kernel::permute, a);
  if (a.out.numel() > 0) exec.kernels->permute(exec, a);
}

void regroup_rows(Exec& exec, const RegroupRows& a) {
  if (noted(exec, Kernel::regroup_rows, a)) return;
  constexpr const char* op = "regroup_rows";
  NRL_CHECK(a.x.rank == 2 && a.place.rank == 1, "{}: x is {}, place is {}", op, describe(a.x),
            describe(a.place));
  const int64_t groups = a.place.dim(0);
  check_rows(op, "x", a.x, a.x.dim(0), a.x.dim(1), a.x.dtype);
  check_rows(op, "out", a.out, a.x.dim(0), a.x.dim(1), a.x.dtype);
  NRL_CHECK(is_vector(a.begin, groups + 1, DType::i32) && is_vector(a.place, groups, DType::i32),
            "{}: begin is {}, place is {}", op, describe(a.begin), describe(a.place));
  const trace::Range range = traced(exec, Kernel::regroup_rows, a);
  if (a.out.numel() > 0) exec.kernels->regroup_rows(exec, a);
}

void unpermute(Exec& exec, const Unpermute& a) {
  if (noted(exec, Kernel::unpermute, a)) return;
  constexpr const char* op = "unpermute";
  const Tensor& entries = a.row ? a.row : a.prob;
  NRL_CHECK(a.x.rank == 2 && entries.rank == 2, "{}: x is {}, row is {}, prob is {}", op, describe(a.x),
            describe(a.row), describe(a.prob));
  const int64_t n = entries.dim(0), k = entries.dim(1);
  if (a.row) check_entries(op, "row", a.row, n, k, DType::i32);
  NRL_CHECK(a.row || a.x.dim(0) == n * k, "{}: x is {} for {} entries", op, describe(a.x), n * k);
  if (a.prob) check_entries(op, "prob", a.prob, n, k, DType::f32);
  check_rows(op, "x", a.x, a.x.dim(0), a.x.dim(1), a.x.dtype);
  check_rows(op, "out", a.out, n, a.x.dim(1), a.x.dtype);
  if (a.addend) check_rows(op, "addend", a.addend, n, a.x.dim(1), a.x.dtype);
  NRL_CHECK(!a.addend || same_or_disjoint(a.addend, a.out), "{}: out overlaps addend partly", op);
  const trace::Range range = traced(exec, Kernel::unpermute, a);
  if (a.out.numel() > 0) exec.kernels->unpermute(exec, a);
}

void gate_backward(Exec& exec, const GateBackward& a) {
  if (noted(exec, Kernel::gate_backward, a)) return;
  constexpr const char* op = "gate_backward";
  NRL_CHECK(a.dact.rank == 2 && a.prob.rank == 2, "{}: dact is {}, prob is {}", op, describe(a.dact),
            describe(a.prob));
  const int64_t n = a.prob.dim(0), k = a.prob.dim(1), rows = a.dact.dim(0), f = a.dact.dim(1);
  if (a.row) check_entries(op, "row", a.row, n, k, DType::i32);
  NRL_CHECK(a.row || rows == n * k, "{}: dact is {} for {} entries", op, describe(a.dact), n * k);
  check_entries(op, "prob", a.prob, n, k, DType::f32);
  check_entries(op, "dprob", a.dprob, n, k, DType::f32);
  for (const auto& [name, t] :
       {std::pair{"dact", a.dact}, {"act", a.act}, {"dact_out", a.dact_out}, {"act_out", a.act_out}})
    check_rows(op, name, t, rows, f, a.dact.dtype);
  NRL_CHECK(same_or_disjoint(a.dact, a.dact_out) && same_or_disjoint(a.act, a.act_out) &&
                a.act_out.data != a.dact_out.data,
            "{}: an output overlaps an input partly", op);
  const trace::Range range = traced(exec, Kernel::gate_backward, a);
  if (n * k > 0) exec.kernels->gate_backward(exec, a);
}

}  // namespace nrl::ops
