#include "core/ops/hash.h"

#include "core/ops/shared/check.h"
#include "core/ops/traced.h"

namespace nrl::ops {

Cost cost(const Exec&, const AddHash& a) {
  return {.read = bytes_of(a.x, a.out), .written = bytes_of(a.out)};
}

void add_hash(Exec& exec, const AddHash& a) {
  if (noted(exec, Kernel::add_hash, a)) return;
  NRL_CHECK((a.x.data || a.x.numel() == 0) && a.x.rank == 1 && a.x.contiguous() && size_of(a.x.dtype) <= 4 &&
                a.first >= 0,
            "add_hash: x is {} at {}, wanted a vector of at most 4 bytes per element", describe(a.x),
            a.first);
  NRL_CHECK(is_vector(a.out, 1, DType::i64), "add_hash: out is {}, wanted i64[1]", describe(a.out));
  const trace::Range range = traced(exec, Kernel::add_hash, a);
  if (a.x.numel() > 0) exec.kernels->add_hash(exec, a);
}

}  // namespace nrl::ops
