#pragma once
// The group of one rank: copies, without MPI and without threads.

#include "core/device/runtime.h"
#include "parallel/comm/communicator.h"

namespace nrl::comm {

/// A group of this rank alone; `world_rank` is its rank in the run. `log` may be null.
std::unique_ptr<Communicator> make_self(std::string_view name, int world_rank, CollectiveLog* log);

/// The same for memory of `device`, on top of `host`, a group of one rank; both must outlive it. Copies are
/// enqueued in the operation's stream.
std::unique_ptr<Communicator> make_device_self(Communicator& host, device::Runtime& device);
std::unique_ptr<Communicator> make_device_self(std::unique_ptr<Communicator> host, device::Runtime& device);

}  // namespace nrl::comm
