#include "tests/ops/backend.h"
#include "tests/sim/ops.h"
#include "tests/sim/sim.h"

namespace nrl::ops_test {

Backend sim_backend() {
  Backend b;
  b.name = "sim";
  b.gpu = true;
  b.kernels = complete(ops::sim_kernels());
  // Everything runs at once on the buffers' own host memory: no device in the Exec, no stream.
  static const std::unique_ptr<device::Runtime> runtime = device::open_sim();
  b.libraries = ops::open_sim_libraries(*runtime, {});
  return b;
}

}  // namespace nrl::ops_test
