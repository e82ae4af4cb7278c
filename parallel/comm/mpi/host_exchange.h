#pragma once
// Private to the MPI backend: collectives of a group on several hosts, some of which have several ranks.
// Ranks of a host add and copy in its shared window; only sums and results of whole hosts travel between
// hosts.
//
// A vector has one block per rank of the group. On every host one rank carries a block (HostLayout::carrier):
//
//   1. It receives the sum of the block over the ranks of its host          SharedWindow::reduce_ranges
//   2. and sends it to the block's own rank, which adds the sums of all hosts         messages ("partials")
//   3. and sends the result to the carriers of the other hosts,                         messages ("results")
//   4. which pass it on to the ranks of their hosts.                         SharedWindow::share_ranges
//
// all_reduce takes all steps, reduce_scatter the first two, all_gather the last two. A broadcast shares the
// vector on the root's host, whose carriers send the blocks to the other hosts' ranks; then steps 3 and 4. Of
// B bytes on H hosts with equal numbers of ranks, a host sends 2(H-1)/H B in an all_reduce, (H-1)/H B in a
// reduce_scatter or all_gather: the minimum.
//
// Blocks are processed in pieces, three at a time: while the ranks of a host add piece s, partials of piece
// s - 1 and results of piece s - 2 are in flight.

#include <memory>
#include <vector>

#include "parallel/comm/communicator.h"
#include "parallel/comm/mpi/host_layout.h"
#include "parallel/comm/mpi/mpi_internal.h"
#include "parallel/comm/mpi/shared_window.h"

namespace nrl::comm {

/// All tasks run in the executor, one at a time. Sums are those of reduce_by_group() with the group's hosts.
class HostExchange {
 public:
  /// Collective over `comm`, whose ranks lie on hosts as `layout` says. Both must outlive the object. `out`
  /// stays null when a host's shared memory could not be allocated.
  static Task create(const MpiOptions& options, MPI_Comm comm, const HostLayout& layout,
                     std::unique_ptr<HostExchange>& out);
  /// Collective.
  Task free();

  Task all_reduce(std::byte* data, int64_t count, DType dtype, Reduce op);
  Task reduce_scatter(const std::byte* in, std::byte* out, int64_t count, DType dtype, Reduce op);
  Task all_gather(const std::byte* in, std::byte* out, int64_t bytes);
  Task broadcast(std::byte* data, int64_t bytes, int root);

 private:
  struct Job;

  HostExchange(const MpiOptions& options, MPI_Comm comm, const HostLayout& layout, int rank);
  const std::vector<int>& carried() const { return carried_[index_]; }
  bool is_here(int rank) const { return layout_.host_of[rank] == host_; }

  Task run(Job job);
  Task start(Job& job, int64_t piece);
  void finish(Job& job, int64_t piece);
  Task share(Job& job, int64_t piece);
  std::vector<Ranges> ranges(const Job& job, int64_t piece) const;
  /// Calls f(host, rank) for the rank of every other host that carries this rank's block.
  template <class F>
  void for_carriers(F f) const;

  MPI_Comm comm_;
  const HostLayout& layout_;
  int64_t piece_bytes_;
  int rank_, host_, index_;
  std::vector<std::vector<int>> carried_;  ///< blocks, by index of this host's ranks
  MPI_Comm local_ = MPI_COMM_NULL;         ///< the ranks of this host
  std::unique_ptr<SharedWindow> window_;
  std::vector<std::byte> scratch_;
};

}  // namespace nrl::comm
