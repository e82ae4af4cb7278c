#pragma once
// Communication of device memory, behind the same Communicator as that of host memory.
//
// All backends: buffers are device memory and are never touched by this process. With a StreamRef (a
// device::StreamHandle) the operation starts after the work already in that stream, and work put there after
// wait() sees the result. Without one the memory must be idle when the operation is issued, and wait() blocks
// until the result is there. Texts (gather_texts, broadcast_text) go through the host communicator.
//
// staged: through pinned host memory and the host communicator. The same results bit for bit as host memory
// has, and the same order rule (executor.h), collectives of the host group included; messages of the host
// group have tags of their own. wait() blocks the host until this rank's part is carried out and its errors
// are known, but not for the copies back to the device. Cannot be captured into a graph: refused.
//
// nccl: never blocks the host in issuing (but for the first messages between two ranks, which connect them)
// or waiting; can be captured into graphs, where wait() comes before the capture ends. What differs from
// the other backends:
// - Sums are added in an order that NCCL chooses from the group's size, its topology and the message's size;
//   a run repeats them, another layout need not. bf16 may be rounded at every addition.
// - Whether max and min pass NaN on is up to NCCL. Sums do.
// - Operations of a group run one after another, messages included (Communicator::single_fifo()): a receive
//   holds up what was issued after it. Messages that depend on each other belong into one exchange() or into
//   channels (channel.h).
// - NCCL has no tags. Within an exchange they pair messages up, whose two ends must then stand in one
//   exchange on both ranks; a single send or receive takes tag 0 only.
// - Kernels of several groups start on the device in the order in which the host issued them, which must be
//   the same on all ranks that share two groups (NCCL_LAUNCH_ORDER_IMPLICIT, set here). Before NCCL 2.26 a
//   process can have one group only.
// - Errors come up in the background: a peer that is gone or an operation that takes longer than
//   nccl_timeout_seconds aborts the group, which frees streams that hang on it. The next call on the group, a
//   wait() or check() throws Error with Exit::peer_lost, naming operation, group and rank.
// - The collective log's times are the device's own (timed events): busy from the start of the kernel to its
//   end, exposed while the caller's stream stood still in wait(). Operations captured into a graph are logged
//   once, when they are captured, without times. staged counts exposed time as the host backends do.

#include "core/device/runtime.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/device_options.h"

#include <memory>

namespace nrl::comm {

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

}  // namespace nrl::comm
