#pragma once
// Private to the MPI backend.

#include "parallel/comm/mpi/mpi_internal.h"

namespace nrl::comm {

/// Takes `comm` over. A group of one rank becomes a self communicator.
std::unique_ptr<Communicator> make_mpi(std::shared_ptr<MpiState> state, MPI_Comm comm, std::string_view name,
                                       std::vector<int> members);

}  // namespace nrl::comm
