// op_tests_device: the cases as gpu_tests runs them, on the simulated device.

#include "tests/ops/device_backend.h"
#include "tests/sim/ops.h"
#include "tests/sim/sim.h"

namespace nrl::ops_test {

Program program() {
  const std::shared_ptr<device::Runtime> device = device::open_sim();
  device->bind_thread();
  Program program;
  program.backends.push_back(device_backend("sim device", device, std::make_shared<device::Stream>(*device),
                                            ops::sim_kernels(), ops::open_sim_libraries(*device, {})));
  return program;
}

}  // namespace nrl::ops_test
