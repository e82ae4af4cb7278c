#pragma once
// Private to the MPI backend: the only header that includes mpi.h.

#include "core/base/error.h"
#include "parallel/comm/executor.h"
#include "parallel/comm/mpi/mpi_session.h"

#include <mpi.h>

#include <cstddef>
#include <span>
#include <vector>

namespace nrl::comm {

/// Throws with MPI's text unless rc is MPI_SUCCESS.
void mpi_check(int rc, const char* what);

/// What all communicators of the process share.
struct MpiState {
  MpiOptions options;
  Ledger* ledger = nullptr;
  Executor executor;
  int rank = 0, size = 1, local_rank = 0, local_size = 1;
  int spins = 0;  ///< polls before giving the core away; 0 when ranks outnumber cores
  std::vector<std::string> hosts;
  std::vector<int> host_of;  ///< of a world rank: the first world rank of its host
  bool failed = false;
  bool finished = false;

  Backoff backoff() const { return Backoff(Executor::current_waiters(), spins); }
};

/// Waits for all requests, giving the core away where nothing moves. To be used in place of MPI's own waits.
void wait_all(std::span<MPI_Request> requests, Backoff backoff, const char* what);

/// Returns when all ranks of `comm` are here. MPI spins in its blocking calls: before one that has no other
/// form, so that it need not wait.
void meet(MPI_Comm comm, Backoff backoff);

/// A piece of memory for or from a peer.
struct Part {
  std::byte* data;
  int64_t bytes;
  int peer;
};

/// Appends the non-blocking operations that move a part (several above 1 GiB; none for 0 bytes).
void post_send(const Part& part, int tag, MPI_Comm comm, std::vector<MPI_Request>& requests);
void post_recv(const Part& part, int tag, MPI_Comm comm, std::vector<MPI_Request>& requests);

/// Tag of the messages inside of collectives, above those of users.
inline constexpr int kCollectiveTag = 20000;

}  // namespace nrl::comm
