#pragma once
// Choice and settings of the backend for device memory. world/make_device.h creates the communicators.

#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace nrl::comm {

enum class DeviceCommKind : uint8_t { nccl, staged };

struct DeviceCommOptions {
  /// staged: bytes of one pinned staging buffer ("slot"), equal on all ranks; every group has two.
  int64_t staged_slot_bytes = int64_t{8} << 20;
  /// nccl: timeout for setting up a group or a connection between two ranks, and for one operation, counted
  /// from the start of its kernel.
  double nccl_init_timeout_seconds = 300;
  double nccl_timeout_seconds = 600;
};

/// What the NCCL library of this build and process supports.
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

/// Chooses the backend. `requested`: as configured; nullopt (auto) takes nccl when it is built in, there are
/// several ranks and each has its own device, otherwise staged. `devices`: Properties::uuid of every rank's
/// device. Fails with Exit::unavailable when the request cannot be met.
DeviceCommChoice choose_device_comm(std::optional<DeviceCommKind> requested,
                                    std::span<const std::string> devices, const NcclSupport& nccl);

/// Why NCCL cannot connect ranks on these devices; empty when it can.
std::string nccl_unsupported_reason(std::span<const std::string> devices, const NcclSupport& nccl);

/// Why NCCL cannot have this many groups in one process; empty when it can.
std::string nccl_groups_unsupported_reason(int groups, const NcclSupport& nccl);

}  // namespace nrl::comm
