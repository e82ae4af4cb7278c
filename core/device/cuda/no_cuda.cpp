#include "core/base/error.h"
#include "core/device/cuda/devices.h"
#include "core/device/runtime.h"

namespace nrl::cuda {

Status query() {
  Status status;
  status.problem =
      "this build was made without the CUDA toolkit; configure with NRL_CUDA=ON where nvcc is on PATH";
  return status;
}

}  // namespace nrl::cuda

namespace nrl::device {

std::unique_ptr<Runtime> open_cuda(int) {
  fail(Exit::unavailable, "there is no GPU to use: {}", cuda::query().problem);
}

}  // namespace nrl::device
