#pragma once
// Initialization and finalization of MPI, and the world communicator.

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "parallel/comm/communicator.h"
#include "parallel/comm/mpi/mpi_options.h"

namespace nrl::comm {

struct MpiState;

/// One per process. Ranks are numbered by host: those of the first host come first, in the order of the
/// launcher, whose own numbers may alternate between hosts. One thread at a time calls MPI, for the
/// operations of all communicators (executor.h), so MPI_THREAD_SERIALIZED suffices; MPI_THREAD_MULTIPLE is
/// requested for abort().
class MpiSession {
 public:
  /// Starts MPI; fails with Exit::unavailable. `log` may be null and must outlive the session.
  MpiSession(const MpiOptions& options, CollectiveLog* log);
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  int rank() const;
  int size() const;
  int local_rank() const;
  int local_size() const;
  /// Host name of every rank.
  const std::vector<std::string>& hosts() const;
  /// The first rank on the host of every rank.
  const std::vector<int>& host_of() const;
  /// The launcher's number of every rank (MPI_COMM_WORLD).
  const std::vector<int>& launched() const;

  /// Collective: `order[r]` is the present rank of the future rank r. All communicators must have been
  /// destroyed.
  void reorder(std::span<const int> order);

  /// The group of all ranks. Communicators must be destroyed before finish().
  std::unique_ptr<Communicator> make_world();
  /// From now on communicators are destroyed without collective clean-up: some ranks may not take part.
  void mark_failed();
  /// MPI_Finalize, collective. The second call does nothing.
  void finish();
  /// MPI_Abort. Callable from any thread.
  [[noreturn]] void abort(int code);

 private:
  std::shared_ptr<MpiState> state_;
};

/// MPI objects of groups and of operations in flight that this process holds now. To be read while no
/// operation is in flight.
struct MpiObjects {
  int64_t communicators = 0, windows = 0, requests = 0;
  bool operator==(const MpiObjects&) const = default;
};
MpiObjects live_mpi_objects();

/// The MPI library's own blocking all_reduce (in place in `out`), reduce_scatter or all_gather on the group
/// of `communicator`, sums of f32 or bf16, for comparison in benchmarks; false when it is not an MPI group or
/// for another operation. `in` must not overlap `out`. No other operation of the process may be in flight.
bool plain_mpi(Communicator& communicator, Op op, const ConstView& in, const View& out);

}  // namespace nrl::comm
