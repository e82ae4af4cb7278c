#include "core/ops/distillation.h"

#include "core/ops/shared/check.h"
#include "core/ops/traced.h"

namespace nrl::ops {
namespace {

/// f32 or i32 (N, width), contiguous.
bool is_row_matrix(const Tensor& t, int64_t n, int64_t width, DType dtype) {
  return t.data && t.rank == 2 && t.dim(0) == n && t.dim(1) == width && t.dtype == dtype && t.contiguous();
}

void check_slice(const char* op, const Tensor& logits, int64_t first_column) {
  NRL_CHECK(
      logits.data && logits.rank == 2 && is_f32_or_bf16(logits) && dense_rows(logits) && logits.dim(1) > 0,
      "{}: logits are {}, wanted f32 or bf16 (N, V)", op, describe(logits));
  NRL_CHECK(first_column >= 0 && first_column <= INT32_MAX - logits.dim(1), "{}: first_column {}", op,
            first_column);
}

/// The logits and ids of gather and scatter.
void check_slice(const char* op, const Tensor& logits, const Tensor& ids, int64_t first_column) {
  check_slice(op, logits, first_column);
  NRL_CHECK(ids.rank == 2 && ids.dim(1) > 0 && is_row_matrix(ids, logits.dim(0), ids.dim(1), DType::i32),
            "{}: ids are {}, logits are {}", op, describe(ids), describe(logits));
}

}  // namespace

Cost cost(const Exec&, const TopColumns& a) {
  return {.read = bytes_of(a.logits, a.part_ids, a.part_values), .written = bytes_of(a.ids, a.values)};
}

Cost cost(const Exec&, const GatherColumns& a) {
  return {.read = bytes_of(a.ids) + static_cast<double>(a.ids.numel() * size_of(a.logits.dtype)),
          .written = bytes_of(a.out)};
}

Cost cost(const Exec&, const TopkKl& a) {
  return {.read = bytes_of(a.student, a.teacher, a.target, a.lse, a.entropy, a.weight, a.loss_scale),
          .written = bytes_of(a.score, a.gradient, a.rest)};
}

Cost cost(const Exec&, const ScatterColumns& a) {
  return {.read = bytes_of(a.ids, a.gradient, a.rest, a.lse) + (a.rest ? bytes_of(a.logits) : 0.0),
          .written = bytes_of(a.dlogits ? a.dlogits : a.logits)};
}

void top_columns(Exec& exec, const TopColumns& a) {
  if (noted(exec, Kernel::top_columns, a)) return;
  constexpr const char* op = "top_columns";
  if (a.logits) {
    check_slice(op, a.logits, a.first_column);
    NRL_CHECK(!a.part_ids && !a.part_values, "{}: logits and parts", op);
  } else {
    const auto is_part = [](const Tensor& t, DType dtype) {
      return t.data && t.rank == 3 && t.dtype == dtype && t.contiguous() && t.dim(0) > 0 && t.dim(2) > 0;
    };
    NRL_CHECK(is_part(a.part_ids, DType::i32) && is_part(a.part_values, DType::f32) &&
                  same_shape(a.part_ids, a.part_values) && a.part_ids.numel() <= INT32_MAX,
              "{}: part_ids are {}, part_values {}; wanted i32 and f32 (R, N, M)", op, describe(a.part_ids),
              describe(a.part_values));
  }
  const int64_t n = a.logits ? a.logits.dim(0) : a.part_ids.dim(1), k = a.ids.dim(-1);
  NRL_CHECK(a.ids.rank == 2 && k > 0 && k <= INT32_MAX && is_row_matrix(a.ids, n, k, DType::i32) &&
                is_row_matrix(a.values, n, k, DType::f32),
            "{}: {} rows; ids are {}, values {}", op, n, describe(a.ids), describe(a.values));
  const trace::Range range = traced(exec, Kernel::top_columns, a);
  if (n > 0) exec.kernels->top_columns(exec, a);
}

void gather_columns(Exec& exec, const GatherColumns& a) {
  if (noted(exec, Kernel::gather_columns, a)) return;
  constexpr const char* op = "gather_columns";
  check_slice(op, a.logits, a.ids, a.first_column);
  NRL_CHECK(is_row_matrix(a.out, a.ids.dim(0), a.ids.dim(1), DType::f32), "{}: out is {}, ids are {}", op,
            describe(a.out), describe(a.ids));
  const trace::Range range = traced(exec, Kernel::gather_columns, a);
  if (a.ids.dim(0) > 0) exec.kernels->gather_columns(exec, a);
}

void topk_kl(Exec& exec, const TopkKl& a) {
  if (noted(exec, Kernel::topk_kl, a)) return;
  constexpr const char* op = "topk_kl";
  const int64_t n = a.student.dim(0), k = a.student.dim(-1);
  NRL_CHECK(k > 0 && is_row_matrix(a.student, n, k, DType::f32), "{}: student is {}, wanted f32 (N, k)", op,
            describe(a.student));
  NRL_CHECK(is_row_matrix(a.teacher, n, k, DType::f32), "{}: teacher is {}, student is {}", op,
            describe(a.teacher), describe(a.student));
  NRL_CHECK(is_vector(a.target, n, DType::i32), "{}: target is {}, student is {}", op, describe(a.target),
            describe(a.student));
  NRL_CHECK(is_vector(a.score, n, DType::f32), "{}: score is {}, student is {}", op, describe(a.score),
            describe(a.student));
  const TopkKl::Options& o = a.options;
  NRL_CHECK(o.temperature > 0 && o.mixed_weight >= 0 && o.mixed_weight <= 1,
            "{}: temperature {}, mixed_weight {}", op, o.temperature, o.mixed_weight);
  NRL_CHECK(o.zero_outside ? is_vector(a.lse, n, DType::f32) : !a.lse, "{}: lse is {}, student is {}", op,
            describe(a.lse), describe(a.student));
  NRL_CHECK(o.zero_outside && a.reverse() > 0 ? is_vector(a.entropy, n, DType::f32) : !a.entropy,
            "{}: entropy is {}, student is {}", op, describe(a.entropy), describe(a.student));
  NRL_CHECK(!a.loss_scale || (a.weight && is_vector(a.loss_scale, 1, DType::f64)), "{}: loss_scale is {}", op,
            describe(a.loss_scale));
  if (a.weight) {
    NRL_CHECK(is_vector(a.weight, n, DType::f32), "{}: weight is {}, student is {}", op, describe(a.weight),
              describe(a.student));
    NRL_CHECK(is_row_matrix(a.gradient, n, k, DType::f32) &&
                  (a.gradient.data == a.student.data || same_or_disjoint(a.gradient, a.student)),
              "{}: gradient is {}, student is {}", op, describe(a.gradient), describe(a.student));
    NRL_CHECK(o.zero_outside ? is_row_matrix(a.rest, n, 2, DType::f32) : !a.rest,
              "{}: rest is {}, student is {}", op, describe(a.rest), describe(a.student));
  } else {
    NRL_CHECK(!a.gradient && !a.rest, "{}: a gradient without a weight", op);
  }
  const trace::Range range = traced(exec, Kernel::topk_kl, a);
  if (n > 0) exec.kernels->topk_kl(exec, a);
}

void scatter_columns(Exec& exec, const ScatterColumns& a) {
  if (noted(exec, Kernel::scatter_columns, a)) return;
  constexpr const char* op = "scatter_columns";
  check_slice(op, a.logits, a.ids, a.first_column);
  const int64_t n = a.ids.dim(0);
  NRL_CHECK(is_row_matrix(a.gradient, n, a.ids.dim(1), DType::f32), "{}: gradient is {}, ids are {}", op,
            describe(a.gradient), describe(a.ids));
  NRL_CHECK(a.rest ? is_row_matrix(a.rest, n, 2, DType::f32) && is_vector(a.lse, n, DType::f32) : !a.lse,
            "{}: rest is {}, lse is {}, ids are {}", op, describe(a.rest), describe(a.lse), describe(a.ids));
  NRL_CHECK(a.inverse_temperature > 0, "{}: inverse_temperature {}", op, a.inverse_temperature);
  if (a.dlogits) {
    const Tensor& d = a.dlogits;
    const bool first_half = d.data == a.logits.data && (n <= 1 || d.step(0) == 2 * a.logits.step(0));
    NRL_CHECK(
        a.logits.dtype == DType::f32 && d.rank == 2 && (d.dtype == DType::bf16 || d.dtype == DType::f16) &&
            same_shape(d, a.logits) && dense_rows(d) && (first_half || same_or_disjoint(d, a.logits)),
        "{}: dlogits are {}, logits are {}; expected with f32 logits: a bf16 or f16 matrix, separate or "
        "in the first half of each row of the logits",
        op, describe(d), describe(a.logits));
  }
  const trace::Range range = traced(exec, Kernel::scatter_columns, a);
  if (n > 0) exec.kernels->scatter_columns(exec, a);
}

}  // namespace nrl::ops
