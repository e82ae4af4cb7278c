#pragma once
// Private to the MPI backend: the only header that includes mpi.h. MPI is called by one thread at a time: by
// the executor, or before its first operation and after its last one.

#include <atomic>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <mpi.h>

#include "parallel/comm/collective_log.h"
#include "parallel/comm/executor.h"
#include "parallel/comm/mpi/mpi_options.h"
#include "parallel/comm/task.h"

namespace nrl::comm {

/// Throws with MPI's text unless rc is MPI_SUCCESS.
void mpi_check(int rc, const char* what);
/// mpi_check() of a call that made a request, which test_all() must complete.
void mpi_started(int rc, const char* what);

/// Live objects of this process (mpi_session.h).
struct MpiCounts {
  std::atomic<int64_t> communicators = 0, windows = 0, requests = 0;
};
MpiCounts& mpi_counts();

/// What all communicators of the process share.
struct MpiState {
  MpiOptions options;
  CollectiveLog* log = nullptr;
  Executor executor;
  /// All processes in the order of their ranks in this program (MpiSession::reorder()).
  MPI_Comm ordered = MPI_COMM_NULL;
  int rank = 0, size = 1, local_rank = 0, local_size = 1;
  // By rank.
  std::vector<std::string> hosts;
  std::vector<int> host_of;   ///< the first rank of its host
  std::vector<int> launched;  ///< its rank in MPI_COMM_WORLD
  bool failed = false;
  bool finished = false;
};

/// True when all requests have completed, which frees them.
bool test_all(std::span<MPI_Request> requests, const char* what);

/// Non-blocking barrier of `comm`. Used before MPI calls that have only a blocking form: MPI spins in them,
/// and no other operation makes progress meanwhile.
Task mpi_barrier(MPI_Comm comm);
/// Runs a task outside of the executor: before its first operation or after its last.
void run_now(Task task);

/// A buffer to send to or receive from a peer.
struct Part {
  std::byte* data;
  int64_t bytes;
  int peer;
};

/// Appends the non-blocking operations that move a part (several above 1 GiB; none for 0 bytes).
void post_send(const Part& part, int tag, MPI_Comm comm, std::vector<MPI_Request>& requests);
void post_recv(const Part& part, int tag, MPI_Comm comm, std::vector<MPI_Request>& requests);

/// Tag of messages within collectives, above those of users and of device memory.
inline constexpr int collective_tag = 20000;
/// Tag of the steps that create groups.
inline constexpr int setup_tag = collective_tag + 1;
/// Tag of results that hosts send each other (host_exchange.h).
inline constexpr int result_tag = collective_tag + 2;

}  // namespace nrl::comm
