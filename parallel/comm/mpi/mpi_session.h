#pragma once
// The MPI library's life in this process, and the world communicator on top of it.

#include "parallel/comm/communicator.h"

#include <memory>
#include <string>
#include <vector>

namespace nrl::comm {

struct MpiOptions {
  /// Collectives among ranks of one host go through shared memory from this many bytes per rank on; below it,
  /// and among several hosts, through MPI messages. Both give the same bits.
  int64_t shared_min_bytes = 0;
  /// Staging memory of a group is size() times four of these at most.
  int64_t shared_slot_bytes = 256 * 1024;
  /// Buffer of a group for reductions through messages; longer vectors are reduced in several chunks.
  int64_t scratch_bytes = 8 << 20;
};

struct MpiState;

/// One per process. MPI is started with MPI_THREAD_MULTIPLE if it can, MPI_THREAD_SERIALIZED at least; all
/// operations of all communicators run one at a time (executor.h).
class MpiSession {
 public:
  /// Starts MPI; fails with Exit::unavailable. `ledger` may be null and must outlive the session.
  MpiSession(const MpiOptions& options, Ledger* ledger);
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  int rank() const;
  int size() const;
  int local_rank() const;
  int local_size() const;
  /// Host name of every world rank.
  const std::vector<std::string>& hosts() const;

  /// The group of all ranks. Communicators must be gone before finish().
  std::unique_ptr<Communicator> make_world();
  /// From now on communicators are dropped without collective clean-up: some ranks may not take part.
  void mark_failed();
  /// MPI_Finalize, collective; nothing on the second call.
  void finish();
  /// Ends all processes of the run. Callable from any thread.
  [[noreturn]] void abort(int code);

 private:
  std::shared_ptr<MpiState> state_;
};

/// Plain MPI_Allreduce (fp32, sum, in place) on the group of `communicator`, for comparison in benchmarks;
/// false when it is not an MPI group. No other operation of the process may be under way.
bool plain_mpi_all_reduce(Communicator& communicator, std::span<float> data);

}  // namespace nrl::comm
