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
  /// nccl: the memory of the model is allocated by device_allocator() and registered with the groups.
  bool nccl_user_buffers = false;
  /// nccl: the most CTAs of a kernel (nccl_ctas()), equal on all ranks; 0: NCCL chooses.
  int nccl_max_ctas = 0;
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

/// CTAs for a kernel of each of `kernels` groups and channels of a rank. Ranks issue the operations of
/// different groups in different orders (a stage sends to the next while it receives from the one before), so
/// the kernels of all of them may be waiting for their partners at once. They must fit side by side, with a
/// quarter of the multiprocessors left to the computation that the partners wait for; a CTA takes most of a
/// multiprocessor's shared memory. Fails with Exit::unavailable where they do not fit.
int nccl_ctas(int multiprocessors, int kernels);

}  // namespace nrl::comm
