#pragma once
// The processes of a run: started by mpirun, srun or alone.

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/mpi/mpi_session.h"

namespace nrl::comm {

struct WorldOptions {
  MpiOptions mpi;
  /// Start MPI also when this is the only process (for tests; it costs 0.4 s).
  bool always_mpi = false;
};

/// True when a launcher (mpirun, srun with PMIx or PMI) started more than one process of this run.
bool launched_with_peers();
/// The rank that the launcher gave this process; 0 without one.
int launched_rank();

/// One per process; must outlive all communication. Does not set up the log: call log::init(rank, size).
class World {
 public:
  /// Starts MPI only if a launcher started several processes; otherwise the world is this process. Fails with
  /// Exit::unavailable when the launcher's processes do not find each other.
  static std::unique_ptr<World> init(const WorldOptions& options = {});
  /// Finalizes; during stack unwinding, aborts all ranks with Exit::internal instead.
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  int local_rank() const { return local_rank_; }
  int local_size() const { return local_size_; }
  /// Host name of every rank. The ranks of a host are consecutive.
  const std::vector<std::string>& hosts() const { return hosts_; }
  /// Node of every rank, counted from 0 in the order of the ranks. Different nodes may have one host name.
  const std::vector<int>& nodes() const { return nodes_; }
  /// The launcher's number of every rank.
  const std::vector<int>& launched() const { return launched_; }

  /// Collective: `order[r]` is the present rank of the future rank r; ranks of a node must stay consecutive.
  /// Replaces comm(); communicators made from it must have been destroyed.
  void reorder(std::span<const int> order);

  /// `wrapper` takes comm() and returns the communicator that replaces it, such as one that records calls.
  void wrap(const std::function<std::unique_ptr<Communicator>(std::unique_ptr<Communicator>)>& wrapper);

  Communicator& comm() { return *comm_; }
  CollectiveLog& collective_log() { return *log_; }

  /// Collective. Communicators made from comm() must have been destroyed. Fails with Exit::internal when one
  /// of them was destroyed with operations never waited for. The second call does nothing.
  void finalize();
  /// From now on communicators are destroyed without collective clean-up.
  void mark_failed();
  /// Ends every process of the run immediately, after flushing the output (core/base/output.h). Callable
  /// from any thread.
  [[noreturn]] void abort(Exit code);

 private:
  World() = default;
  void take_ranks();
  std::unique_ptr<CollectiveLog> log_;
  std::unique_ptr<MpiSession> mpi_;
  std::unique_ptr<Communicator> comm_;
  int rank_ = 0, size_ = 1, local_rank_ = 0, local_size_ = 1;
  std::vector<std::string> hosts_;
  std::vector<int> nodes_{0}, launched_{0};
  bool finalized_ = false;
};

}  // namespace nrl::comm
