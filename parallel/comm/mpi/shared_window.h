#pragma once
// Private to the MPI backend: collectives of one host through a shared staging window.
//
// Vectors are processed in chunks through two slots (buffers) per rank, in pipeline steps separated by one
// barrier each. In step s a rank copies chunk s into a slot, reduces chunk s - 1 and copies out the result of
// chunk s - 2. A slot is refilled two steps later, when every rank has passed the barrier after its last read
// of it. A call has no barrier after its last step: the first barrier of the next call serves for it.

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "parallel/comm/communicator.h"
#include "parallel/comm/mpi/mpi_internal.h"

namespace nrl::comm {

/// Barrier state that a rank publishes in shared memory.
struct Arrivals {
  std::atomic<uint32_t> count;  ///< barriers entered, modulo 2^32
  Doorbell doorbell;            ///< rung by ranks that enter one while this rank sleeps
};

/// Elements [begin, begin + size) of a vector.
struct Range {
  int64_t begin, size;
};
/// Taken one after the other, without the gaps.
using Ranges = std::vector<Range>;

/// All tasks run in the executor, one at a time.
class SharedWindow {
 public:
  /// Collective over `comm`, whose ranks must share a host. `out` stays null when the
  /// allocation fails on any rank.
  static Task create(MPI_Comm comm, int64_t slot_bytes, std::unique_ptr<SharedWindow>& out);
  /// Collective.
  Task free();

  Task all_reduce(std::byte* data, int64_t count, DType dtype, Reduce op);
  Task all_gather(const std::byte* in, std::byte* out, int64_t bytes);
  Task reduce_scatter(const std::byte* in, std::byte* out, int64_t count, DType dtype, Reduce op);
  Task broadcast(std::byte* data, int64_t bytes, int root);
  Task barrier();
  /// Rank r gets in `out` the sums of the ranges `of_rank[r]` of `in`.
  Task reduce_ranges(const std::byte* in, std::vector<Ranges> of_rank, std::byte* out, DType dtype,
                     Reduce op);
  /// Every rank gets the ranges `of_rank[r]` of `data` from rank r. `width`: bytes of an element.
  Task share_ranges(std::byte* data, std::vector<Ranges> of_rank, int64_t width);

  /// From now on tasks that wait make progress on the messages of `comm`, for windows whose ranks wait for
  /// other hosts too. They must be polled: there is no doorbell.
  void serve_messages(MPI_Comm comm) { served_ = comm; }
  /// Rung when another rank enters the barrier that a task waits in; null when no task waits.
  Doorbell* doorbell() { return waiting_ ? &arrivals_[rank_]->doorbell : nullptr; }

 private:
  SharedWindow(int64_t slot_bytes, int rank, int size) : slot_bytes_(slot_bytes), rank_(rank), size_(size) {}

  template <class CopyIn, class Reduction, class CopyOut>
  Task pipeline(int64_t chunks, int depth, CopyIn copy_in, Reduction reduction, CopyOut copy_out);
  template <class Blocks>
  Task reduce_blocks(const std::byte* in, std::byte* out, DType dtype, Reduce op, Blocks blocks);
  void enter();
  bool all_entered();
  int64_t result_bytes() const;
  std::byte* slot(int rank, int64_t parity) const;
  std::byte* result(int rank, int64_t parity) const;

  int64_t slot_bytes_;
  int rank_, size_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  MPI_Win window_ = MPI_WIN_NULL;
  MPI_Comm served_ = MPI_COMM_NULL;
  std::vector<std::byte*> segments_;  ///< of every rank, mapped here
  std::vector<Arrivals*> arrivals_;
  uint32_t entered_ = 0;  ///< barriers
  int seen_ = 0;          ///< other ranks known to have entered the current one
  bool waiting_ = false;
  int64_t step_ = 0;
};

}  // namespace nrl::comm
