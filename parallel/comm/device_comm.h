#pragma once
// Communication of device memory, behind the same Communicator as that of host memory.
//
// All backends: buffers are device memory and are never touched by this process. With a StreamRef (a
// device::StreamHandle) the operation starts after the work already in that stream, and work put there after
// wait() sees the result. Without one the memory must be idle when the operation is issued, and wait() blocks
// until the result is there. Texts (gather_texts, broadcast_text) go through the host communicator.
//
// staged: through pinned host memory and the host communicator. The same results bit for bit as host memory
// has. Operations take their place among those on host memory (executor.h): one global sequence explains
// both. wait() blocks the host until this rank's part is carried out and its errors are known, but not for
// the copies back to the device. Cannot be recorded into a graph: refused.
//
// nccl: never blocks the host in issuing (but for the first messages between two ranks, which connect them)
// or waiting; can be recorded into graphs, where wait() comes before the recording ends. What differs from
// the other backends:
// - Sums are added in an order that NCCL chooses from the group's size, its topology and the message's size;
//   a run repeats them, another layout need not. bf16 may be rounded at every addition.
// - Whether max and min pass NaN on is up to NCCL. Sums do.
// - Operations of a group run one after another, messages included: a receive holds up what was issued after
//   it. Messages that depend on each other belong into one exchange().
// - NCCL has no tags. Within an exchange they pair messages up, whose two ends must then stand in one
//   exchange on both ranks; a single send or receive takes tag 0 only.
// - Errors come up in the background: a peer that is gone or an operation that takes longer than
//   nccl_timeout_seconds aborts the group, which frees streams that hang on it. The next call on the group, a
//   wait() or check() throws Error with Exit::peer_lost, naming operation, group and rank.
// - The ledger's times are the device's own (timed events): busy from the start of the kernel to its end,
//   exposed while the caller's stream stood still in wait(). Operations recorded into a graph are written
//   down once, when they are recorded, without times. staged counts exposed time as the host backends do.

#include "core/device/runtime.h"
#include "parallel/comm/communicator.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace nrl::comm {

enum class DeviceCommKind : uint8_t { nccl, staged };

struct DeviceCommOptions {
  /// staged: pinned memory per slot, equal on all ranks; there are two.
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

/// The members of `host` as a group for memory of `device`. Collective over `host`; `host` and `device` must
/// outlive it, and no operation on `host` may be lost meanwhile. Every group made, by split() and subgroup()
/// as well, sets its backend up at once: make only those that are used. A group of one rank needs neither
/// NCCL nor MPI. Destruction as for Communicator.
///
/// nccl fails with Exit::unavailable where the build has none, the ranks do not meet in time, or two of them
/// have the same device and the library cannot do that (before 2.30, or NCCL_MULTI_RANK_GPU_ENABLE unset).
std::unique_ptr<Communicator> make_device_communicator(DeviceCommKind kind, Communicator& host,
                                                       device::Runtime& device,
                                                       const DeviceCommOptions& options = {});

struct DeviceCommChoice {
  DeviceCommKind kind = DeviceCommKind::staged;
  std::string why;  ///< for the user, "every rank has a device of its own"
};

/// What a group should use. `wanted`: as configured, nothing for auto: nccl when it is built in, there are
/// several ranks and each has a device of its own, otherwise staged. `devices`: Properties::uuid of every
/// rank's device. A wish that cannot be met is Exit::unavailable.
DeviceCommChoice choose_device_comm(std::optional<DeviceCommKind> wanted,
                                    std::span<const std::string> devices, const NcclSupport& nccl);

/// Why NCCL cannot connect ranks on these devices; empty when it can.
std::string nccl_obstacle(std::span<const std::string> devices, const NcclSupport& nccl);

}  // namespace nrl::comm
