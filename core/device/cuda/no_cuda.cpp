#include "core/device/cuda/devices.h"

namespace nrl::cuda {

Status query() {
  Status status;
  status.problem = "this build was made without the CUDA toolkit";
  return status;
}

}  // namespace nrl::cuda
