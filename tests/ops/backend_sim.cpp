#include "tests/ops/backend.h"

namespace nrl::ops_test {

Backend sim_backend() {
  Backend b;
  b.name = "sim";
  b.gpu = true;
  b.kernels = complete(ops::sim_kernels());
  return b;
}

}  // namespace nrl::ops_test
