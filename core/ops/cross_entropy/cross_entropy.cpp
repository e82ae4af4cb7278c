#include "core/ops/cross_entropy.h"

#include <algorithm>

#include "core/device/runtime.h"
#include "core/ops/cross_entropy/row_plan.h"
#include "core/ops/kernel_table.h"
#include "core/ops/shared/check.h"
#include "core/trace/trace.h"

namespace nrl::ops {

Cost cost(const Exec&, const CrossEntropy& a) {
  const Tensor& gradient = a.dlogits ? a.dlogits : a.logits;
  return {.read = bytes_of(a.logits, a.target, a.weight),
          .written = (a.weight ? bytes_of(gradient) : 0) + bytes_of(a.log_prob, a.lse)};
}

void cross_entropy(Exec& exec, const CrossEntropy& a) {
  if (noted(exec, Kernel::cross_entropy, a)) return;
  constexpr const char* op = "cross_entropy";
  NRL_CHECK(a.logits.data && a.logits.rank == 2 && is_float(a.logits) && dense_rows(a.logits) &&
                a.logits.dim(1) > 0,
            "{}: logits are {}, wanted f32 or bf16 (N, V)", op, describe(a.logits));
  const int64_t n = a.logits.dim(0);
  NRL_CHECK(is_vector(a.target, n, DType::i32), "{}: target is {}, logits are {}", op, describe(a.target),
            describe(a.logits));
  NRL_CHECK(!a.weight || is_vector(a.weight, n, DType::f32), "{}: weight is {}", op, describe(a.weight));
  NRL_CHECK(is_vector(a.log_prob, n, DType::f32), "{}: log_prob is {}", op, describe(a.log_prob));
  NRL_CHECK(!a.lse || is_vector(a.lse, n, DType::f32), "{}: lse is {}", op, describe(a.lse));
  if (a.dlogits) {
    const Tensor& d = a.dlogits;
    const bool first_half = d.data == a.logits.data && (n <= 1 || d.step(0) == 2 * a.logits.step(0));
    NRL_CHECK(a.weight && a.logits.dtype == DType::f32 && d.rank == 2 && d.dtype == DType::bf16 &&
                  same_shape(d, a.logits) && dense_rows(d) && (first_half || same_or_disjoint(d, a.logits)),
              "{}: dlogits are {}, logits are {}; expected with weight and f32 logits: a bf16 matrix, "
              "separate or in "
              "the first half of each row of the logits",
              op, describe(d), describe(a.logits));
  }
  const trace::Range range("cross_entropy");
  if (n > 0) exec.kernels->cross_entropy(exec, a);
}

RowPlan row_plan(const Exec& exec, int64_t v, DType dtype, bool gradient) {
  const int64_t row = v * size_of(dtype);
  RowPlan plan;
  plan.threads = row < (8 << 10) ? 128 : 512;
  if (!gradient) return plan;
  // Two blocks per multiprocessor overlap reading and writing. Rows of which two blocks could keep less than
  // half would not stay in the L2 cache either: then one block gets all of the shared memory.
  constexpr int64_t hopper = 227 << 10, reserved = 2 << 10;
  const int64_t limit =
      (exec.device ? static_cast<int64_t>(exec.device->properties().shared_memory_optin) : hopper) - reserved;
  int64_t budget = limit / 2;
  if (row > 2 * budget) {
    plan.threads = 1024;
    budget = limit;
  }
  const int64_t chunks = (row + plan.chunk_bytes() - 1) / plan.chunk_bytes();
  plan.kept = static_cast<int>(std::clamp<int64_t>(budget / plan.chunk_bytes(), 0, chunks));
  return plan;
}

}  // namespace nrl::ops
