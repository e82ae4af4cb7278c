#pragma once
// Private to the MPI backend.

#include <memory>
#include <string_view>

#include "parallel/comm/communicator.h"
#include "parallel/comm/mpi/mpi_internal.h"

namespace nrl::comm {

/// Takes ownership of `comm`; collective, before the executor's first operation. A group of one rank becomes
/// a self communicator.
std::unique_ptr<Communicator> make_mpi(std::shared_ptr<MpiState> state, MPI_Comm comm, std::string_view name);

/// The MPI communicator below; MPI_COMM_NULL when `communicator` is not an MPI group.
MPI_Comm raw_mpi(Communicator& communicator);

}  // namespace nrl::comm
