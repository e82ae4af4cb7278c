#pragma once
// The group of one rank: copies, without MPI and without threads.

#include "parallel/comm/communicator.h"

namespace nrl::comm {

/// A group of this rank alone; `world_rank` is its rank in the run. `ledger` may be null.
std::unique_ptr<Communicator> make_self(std::string_view name, int world_rank, Ledger* ledger);

}  // namespace nrl::comm
