#include "core/base/error.h"
#include "core/device/cuda/devices.h"
#include "core/device/runtime.h"

namespace nrl::cuda {

Status query() {
  Status status;
  status.problem = "this build was made without the CUDA toolkit";
  return status;
}

}  // namespace nrl::cuda

namespace nrl::device {

std::unique_ptr<Runtime> open_cuda(int) {
  fail(Exit::unavailable, "this build was made without the CUDA toolkit");
}

}  // namespace nrl::device
