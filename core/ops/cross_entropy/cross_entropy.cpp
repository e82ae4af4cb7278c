#include "core/ops/cross_entropy.h"

#include <algorithm>
#include <cmath>

#include "core/device/runtime.h"
#include "core/ops/cross_entropy/row_plan.h"
#include "core/ops/shared/check.h"
#include "core/ops/traced.h"

namespace nrl::ops {

Cost cost(const Exec&, const CrossEntropy& a) {
  const Tensor& gradient = a.dlogits ? a.dlogits : a.logits;
  // The gradient of a slice is one pass, its statistics were another one.
  const bool reads_logits = a.weight || !a.statistics;
  return {.read = (reads_logits ? bytes_of(a.logits) : 0) +
                  bytes_of(a.target, a.weight, a.loss_scale, a.statistics),
          .written = (a.weight ? bytes_of(gradient) : 0) + bytes_of(a.log_prob, a.lse, a.entropy)};
}

Cost cost(const Exec&, const CrossEntropyStatistics& a) {
  return {.read = bytes_of(a.logits, a.target), .written = bytes_of(a.out)};
}

Cost cost(const Exec&, const CrossEntropyGradient& a) {
  return {.read = bytes_of(a.logits, a.target, a.lse, a.weight, a.entropy, a.entropy_weight, a.loss_scale),
          .written = bytes_of(a.dlogits ? a.dlogits : a.logits)};
}

namespace {

void check_logits(const char* op, const Tensor& logits, const Tensor& target, int64_t first_column) {
  NRL_CHECK(
      logits.data && logits.rank == 2 && is_f32_or_bf16(logits) && dense_rows(logits) && logits.dim(1) > 0,
      "{}: logits are {}, wanted f32 or bf16 (N, V)", op, describe(logits));
  NRL_CHECK(is_vector(target, logits.dim(0), DType::i32), "{}: target is {}, logits are {}", op,
            describe(target), describe(logits));
  NRL_CHECK(first_column >= 0 && first_column <= INT32_MAX - logits.dim(1), "{}: first_column {}", op,
            first_column);
}

void check_inverse_temperature(const char* op, float t) {
  NRL_CHECK(std::isfinite(t) && t > 0, "{}: inverse_temperature {}, wanted a positive number", op, t);
}

/// The gradient may be rounded: to a matrix of its own or over the first half of each row of the logits.
void check_dlogits(const char* op, const Tensor& d, const Tensor& logits) {
  if (!d) return;
  const bool first_half = d.data == logits.data && (logits.dim(0) <= 1 || d.step(0) == 2 * logits.step(0));
  NRL_CHECK(
      logits.dtype == DType::f32 && d.rank == 2 && (d.dtype == DType::bf16 || d.dtype == DType::f16) &&
          same_shape(d, logits) && dense_rows(d) && (first_half || same_or_disjoint(d, logits)),
      "{}: dlogits are {}, logits are {}; expected with f32 logits: a bf16 or f16 matrix, separate or in "
      "the first half of each row of the logits",
      op, describe(d), describe(logits));
}

bool is_statistics(const Tensor& t, int rank, int64_t n) {
  return t.data && t.rank == rank && t.dtype == DType::f32 && t.contiguous() && t.dim(rank - 2) == n &&
         (t.dim(rank - 1) == 3 || t.dim(rank - 1) == 4);
}

}  // namespace

void cross_entropy_statistics(Exec& exec, const CrossEntropyStatistics& a) {
  if (noted(exec, Kernel::cross_entropy_statistics, a)) return;
  constexpr const char* op = "cross_entropy_statistics";
  check_logits(op, a.logits, a.target, a.first_column);
  NRL_CHECK(is_statistics(a.out, 2, a.logits.dim(0)), "{}: out is {}, logits are {}", op, describe(a.out),
            describe(a.logits));
  check_inverse_temperature(op, a.inverse_temperature);
  const trace::Range range = traced(exec, Kernel::cross_entropy_statistics, a);
  if (a.logits.dim(0) > 0) exec.kernels->cross_entropy_statistics(exec, a);
}

void cross_entropy(Exec& exec, const CrossEntropy& a) {
  if (noted(exec, Kernel::cross_entropy, a)) return;
  constexpr const char* op = "cross_entropy";
  check_logits(op, a.logits, a.target, a.first_column);
  const int64_t n = a.logits.dim(0);
  NRL_CHECK(a.statistics ? is_statistics(a.statistics, 3, n) && (a.statistics.dim(2) == 4) == bool(a.entropy)
                         : a.first_column == 0,
            "{}: statistics are {}, logits are {} from column {}, entropy is {}", op, describe(a.statistics),
            describe(a.logits), a.first_column, describe(a.entropy));
  NRL_CHECK(!a.weight || is_vector(a.weight, n, DType::f32), "{}: weight is {}", op, describe(a.weight));
  NRL_CHECK(!a.loss_scale || (a.weight && is_vector(a.loss_scale, 1, DType::f64)), "{}: loss_scale is {}", op,
            describe(a.loss_scale));
  NRL_CHECK(is_vector(a.log_prob, n, DType::f32), "{}: log_prob is {}", op, describe(a.log_prob));
  NRL_CHECK(!a.lse || is_vector(a.lse, n, DType::f32), "{}: lse is {}", op, describe(a.lse));
  NRL_CHECK(!a.entropy || is_vector(a.entropy, n, DType::f32), "{}: entropy is {}", op, describe(a.entropy));
  check_inverse_temperature(op, a.inverse_temperature);
  NRL_CHECK(!a.weight || (!a.entropy && a.inverse_temperature == 1),
            "{}: entropy is {}, inverse_temperature {}; with weight: none and 1", op, describe(a.entropy),
            a.inverse_temperature);
  NRL_CHECK(!a.dlogits || a.weight, "{}: dlogits without weight", op);
  check_dlogits(op, a.dlogits, a.logits);
  const trace::Range range = traced(exec, Kernel::cross_entropy, a);
  if (n > 0) exec.kernels->cross_entropy(exec, a);
}

void cross_entropy_gradient(Exec& exec, const CrossEntropyGradient& a) {
  if (noted(exec, Kernel::cross_entropy_gradient, a)) return;
  constexpr const char* op = "cross_entropy_gradient";
  check_logits(op, a.logits, a.target, a.first_column);
  const int64_t n = a.logits.dim(0);
  NRL_CHECK(is_vector(a.lse, n, DType::f32), "{}: lse is {}", op, describe(a.lse));
  NRL_CHECK(is_vector(a.weight, n, DType::f32), "{}: weight is {}", op, describe(a.weight));
  NRL_CHECK(a.entropy_weight
                ? is_vector(a.entropy, n, DType::f32) && is_vector(a.entropy_weight, n, DType::f32)
                : !a.entropy,
            "{}: entropy is {}, entropy_weight is {}", op, describe(a.entropy), describe(a.entropy_weight));
  NRL_CHECK(!a.loss_scale || is_vector(a.loss_scale, 1, DType::f64), "{}: loss_scale is {}", op,
            describe(a.loss_scale));
  check_inverse_temperature(op, a.inverse_temperature);
  check_dlogits(op, a.dlogits, a.logits);
  const trace::Range range = traced(exec, Kernel::cross_entropy_gradient, a);
  if (n > 0) exec.kernels->cross_entropy_gradient(exec, a);
}

RowPlan row_plan(const Exec& exec, int64_t v, DType dtype, bool gradient) {
  const int64_t row = v * size_of(dtype);
  RowPlan plan;
  plan.threads = row < (8 << 10) ? 128 : 512;
  if (!gradient) return plan;
  // Two blocks per multiprocessor overlap reading and writing, also of rows that they cannot keep. On an H200
  // (rows of 128,256 bf16 numbers) they took 1.46 ms where one block with all of the shared memory took 2.12.
  constexpr int64_t hopper = 227 << 10, reserved = 2 << 10;
  const int64_t limit =
      (exec.device ? static_cast<int64_t>(exec.device->properties().shared_memory_optin) : hopper) - reserved;
  const int64_t budget = limit / 2;
  const int64_t chunks = (row + plan.chunk_bytes() - 1) / plan.chunk_bytes();
  plan.kept = static_cast<int>(std::clamp<int64_t>(budget / plan.chunk_bytes(), 0, chunks));
  return plan;
}

}  // namespace nrl::ops
