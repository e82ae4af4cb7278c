#include "core/ops/cross_entropy/cross_entropy.h"

#include "core/ops/check.h"
#include "core/ops/kernel_table.h"
#include "core/trace/trace.h"

namespace nrl::ops {

void cross_entropy(Exec& exec, const CrossEntropy& a) {
  constexpr const char* op = "cross_entropy";
  NRL_CHECK(a.logits.data && a.logits.rank == 2 && a.logits.dtype == DType::f32 && dense_rows(a.logits) &&
                a.logits.dim(1) > 0,
            "{}: logits are {}, wanted f32 (N, V)", op, describe(a.logits));
  const int64_t n = a.logits.dim(0);
  NRL_CHECK(is_vector(a.target, n, DType::i32), "{}: target is {}, logits are {}", op, describe(a.target),
            describe(a.logits));
  NRL_CHECK(!a.weight || is_vector(a.weight, n, DType::f32), "{}: weight is {}", op, describe(a.weight));
  NRL_CHECK(is_vector(a.log_prob, n, DType::f32), "{}: log_prob is {}", op, describe(a.log_prob));
  NRL_CHECK(!a.lse || is_vector(a.lse, n, DType::f32), "{}: lse is {}", op, describe(a.lse));
  const trace::Range range("cross_entropy");
  if (n > 0) exec.kernels->cross_entropy(exec, a);
}

}  // namespace nrl::ops
