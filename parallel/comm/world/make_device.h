#pragma once
// Communication of device memory, behind the same Communicator as that of host memory.
//
// All backends: buffers are device memory, which the host never dereferences. With a StreamRef (a
// device::StreamHandle) the operation starts after the work already in that stream, and work enqueued after
// wait() sees the result. Without one the memory must be idle when the operation is issued, and wait() blocks
// until the result is available. Texts (gather_texts, broadcast_text) go through the host communicator.
//
// staged (host-staged): through pinned host memory and the host communicator. Results are bitwise identical
// to those of host memory, and the order rule is the same (executor.h), shared with the host group's
// collectives; messages have their own tags. wait() blocks the host until this rank's part is done and its
// errors are known, but not for the copies back to the device. Cannot be captured into a graph: an error.
//
// nccl: never blocks the host in issuing (except for the first messages between two ranks without
// Communicator::connect(), which connect them) or waiting; can be captured into graphs, where wait() must
// come before the capture ends. Differences from the other backends:
// - NCCL chooses the order of sums from the group's size, its topology and the message's size; it repeats
//   within a layout, not across layouts. bf16 and f16 may be rounded at every addition.
// - Whether max and min propagate NaN is up to NCCL. Sums do.
// - Operations of a group run one after another, messages included (Communicator::single_fifo()): a receive
//   blocks operations issued after it. Messages that depend on each other need one exchange() or channels
//   (channel.h).
// - NCCL has no tags. Within an exchange they pair messages, whose two ends must be in one exchange on both
//   ranks; a single send or receive must have tag 0.
// - Kernels of several groups start on the device in any order, and each occupies it until its partners run.
//   The kernels of all groups and channels of a rank must therefore fit side by side: nccl_max_ctas bounds
//   them (parallel/grid/groups.h sets it), CUDA_DEVICE_MAX_CONNECTIONS=32 gives them queues of their own, and
//   NCCL_LAUNCH_ORDER_IMPLICIT is turned off. launch_model.h is the model of this; tests ask it about every
//   schedule and about random layouts.
// - Errors are asynchronous: a lost peer or an operation that takes longer than nccl_timeout_seconds aborts
//   the group, which frees streams blocked on it. The next call on the group, a wait() or check() throws
//   Error with Exit::peer_lost, naming operation, group and rank.
// - The collective log has device times (timed events): busy from the start of the kernel to its end, exposed
//   while the caller's stream was blocked in wait(). Operations captured into a graph are logged once, at
//   capture, without times. staged counts exposed time as the host backends do.

#include <memory>

#include "core/device/runtime.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/device_options.h"

namespace nrl::comm {

/// The members of `host` as a group for memory of `device`. Collective over `host`; `host` and `device` must
/// outlive it. Every group (split() and subgroup() included) sets up its backend immediately: create only
/// groups that are used. A group of one rank needs neither NCCL nor MPI. Destruction as for Communicator.
///
/// nccl fails with Exit::unavailable when the build has none, the ranks do not connect in time, or two of
/// them share a device and the library does not support that (before 2.30, or with
/// NCCL_MULTI_RANK_GPU_ENABLE unset).
std::unique_ptr<Communicator> make_device_communicator(DeviceCommKind kind, Communicator& host,
                                                       device::Runtime& device,
                                                       const DeviceCommOptions& options = {});

/// Allocates memory that register_memory() of such groups can use fully: NCCL's for nccl, which the links and
/// switches between GPUs and the network adapters can address; else that of the runtime.
device::Allocator device_allocator(DeviceCommKind kind);

}  // namespace nrl::comm
