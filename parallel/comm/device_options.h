#pragma once
// How device memory is communicated: the choice of a backend and its settings. make_device.h makes groups.

#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace nrl::comm {

enum class DeviceCommKind : uint8_t { nccl, staged };

struct DeviceCommOptions {
  /// staged: pinned memory per staging slot, equal on all ranks; every group has two slots.
  int64_t staged_slot_bytes = int64_t{8} << 20;
  /// nccl: longest time for setting up a group or a connection of two ranks, and for one operation from the
  /// moment its kernel starts.
  double nccl_init_timeout_seconds = 300;
  double nccl_timeout_seconds = 600;
};

/// The NCCL library of this build and process.
struct NcclSupport {
  bool built = false;
  int version = 0;              ///< of the library at run time, 23203 for 2.32.3
  bool multi_rank_gpu = false;  ///< NCCL_MULTI_RANK_GPU_ENABLE=1 is set
};
NcclSupport nccl_support();

struct DeviceCommChoice {
  DeviceCommKind kind = DeviceCommKind::staged;
  std::string why;  ///< for the user, "every rank has a device of its own"
};

/// What a group should use. `requested`: as configured, nothing for auto: nccl when it is built in, there are
/// several ranks and each has a device of its own, otherwise staged. `devices`: Properties::uuid of every
/// rank's device. A request that cannot be met is Exit::unavailable.
DeviceCommChoice choose_device_comm(std::optional<DeviceCommKind> requested,
                                    std::span<const std::string> devices, const NcclSupport& nccl);

/// Why NCCL cannot connect ranks on these devices; empty when it can.
std::string nccl_unsupported_reason(std::span<const std::string> devices, const NcclSupport& nccl);

/// Why NCCL cannot have this many groups in one process; empty when it can.
std::string nccl_groups_unsupported_reason(int groups, const NcclSupport& nccl);

}  // namespace nrl::comm
