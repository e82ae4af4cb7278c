#include "apps/train/launch/accelerator.h"
#include "core/device/cuda/devices.h"

namespace nrl::train {

const AcceleratorBackend& accelerator_backend() {
  static const AcceleratorBackend backend{[](std::string& why_not) {
                                            const cuda::Status status = cuda::query();
                                            why_not = status.problem;
                                            std::vector<VisibleDevice> visible;
                                            for (const cuda::DeviceInfo& d : status.devices)
                                              visible.push_back({d.uuid, d.memory});
                                            return visible;
                                          },
                                          device::open_cuda, ops::cuda_kernels, ops::open_cuda_libraries};
  return backend;
}

}  // namespace nrl::train
