// The backends of device memory on real devices, shared by ranks where there are more ranks than devices.
#include <cstdio>

#include "core/base/error.h"
#include "core/device/choose.h"
#include "core/device/cuda/devices.h"
#include "parallel/comm/recording/recording.h"
#include "parallel/comm/world/make_device.h"
#include "tests/comm/backends.h"

using namespace nrl;
using namespace nrl::comm;

std::vector<std::unique_ptr<Backend>>& backends() {
  static std::vector<std::unique_ptr<Backend>> all;
  return all;
}

bool open_backends(World& world, std::string& why_not) {
  const cuda::Status status = cuda::query();
  std::vector<int32_t> usable = {status.problem.empty() && !status.devices.empty() ? 1 : 0};
  world.comm().all_reduce(usable, Reduce::min);
  if (!usable[0]) {
    why_not = status.problem.empty() ? "no device on some rank" : status.problem;
    return false;
  }
  const int ordinal = device::choose_ordinal(world.local_rank(), world.local_size(),
                                             static_cast<int>(status.devices.size()), true);
  const std::shared_ptr<device::Runtime> runtime = device::open_cuda(ordinal);
  DeviceCommOptions options;
  options.staged_slot_bytes = 1 << 17;
  options.nccl_timeout_seconds = 60;
  options.nccl_init_timeout_seconds = 60;
  backends().push_back(std::make_unique<Backend>(
      "staged", make_device_communicator(DeviceCommKind::staged, world.comm(), *runtime, options), runtime));
  backends().push_back(std::make_unique<Backend>(
      "staged, recorded",
      make_recording(make_device_communicator(DeviceCommKind::staged, world.comm(), *runtime, options),
                     std::make_shared<Recorder>(), RecordingMode::check),
      runtime));
  backends().back()->blocks = true;
  const auto devices = world.comm().gather_texts(runtime->properties().uuid);
  if (const std::string obstacle = nccl_unsupported_reason(devices, nccl_support()); !obstacle.empty()) {
    if (world.rank() == 0) std::printf("nccl is left out: %s\n", obstacle.c_str());
    return true;
  }
  backends().push_back(std::make_unique<Backend>(
      "nccl", make_device_communicator(DeviceCommKind::nccl, world.comm(), *runtime, options), runtime));
  backends().back()->strict = world.size() == 1;
  return true;
}
