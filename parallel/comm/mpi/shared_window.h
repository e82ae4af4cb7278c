#pragma once
// Private to the MPI backend: collectives of one host through a shared staging window.
//
// Vectors pass in chunks through two slots per rank, in steps; between two steps is one barrier. In a step a
// rank fills a slot with its next chunk, reduces the chunk before, and fetches the result of the one before
// that. A slot is filled again two steps later, when every rank has passed the barrier that follows its last
// reading of it. The last step of a call has no barrier after it: the first step of the next call takes its
// place.

#include "parallel/comm/mpi/mpi_internal.h"

#include "parallel/comm/communicator.h"

#include <atomic>
#include <cstdint>
#include <memory>

namespace nrl::comm {

/// What a rank tells the others of its barriers; in shared memory.
struct Arrivals {
  std::atomic<uint32_t> count;  ///< barriers entered, modulo 2^32
  Bell bell;                    ///< rung by ranks that entered one while this rank sleeps
};

/// All tasks run in the executor, one of them at a time.
class SharedWindow {
 public:
  /// Collective over `comm`, whose ranks share a host. `out` stays null where the system refuses the memory
  /// (on any rank).
  static Task create(MPI_Comm comm, int64_t slot_bytes, std::unique_ptr<SharedWindow>& out);
  /// Collective.
  Task free();

  Task all_reduce(std::byte* data, int64_t count, DType dtype, Reduce op);
  Task all_gather(const std::byte* in, std::byte* out, int64_t bytes);
  Task reduce_scatter(const std::byte* in, std::byte* out, int64_t count, DType dtype, Reduce op);
  Task broadcast(std::byte* data, int64_t bytes, int root);
  Task barrier();

  /// What rings when another rank enters the barrier that a task waits in; null when none does.
  Bell* bell() { return waiting_ ? &arrivals_[static_cast<size_t>(rank_)]->bell : nullptr; }

 private:
  SharedWindow(int64_t slot_bytes, int rank, int size) : slot_bytes_(slot_bytes), rank_(rank), size_(size) {}

  template <class CopyIn, class Reduction, class CopyOut>
  Task pipeline(int64_t chunks, int depth, CopyIn copy_in, Reduction reduction, CopyOut copy_out);
  void enter();
  bool all_entered();
  int64_t result_bytes() const;
  std::byte* slot(int rank, int64_t parity) const;
  std::byte* result(int rank, int64_t parity) const;

  int64_t slot_bytes_;
  int rank_, size_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  MPI_Win window_ = MPI_WIN_NULL;
  std::vector<std::byte*> segments_;  ///< of every rank, mapped here
  std::vector<Arrivals*> arrivals_;
  uint32_t entered_ = 0;  ///< barriers
  int seen_ = 0;          ///< other ranks known to have entered the current one
  bool waiting_ = false;
  int64_t step_ = 0;
};

}  // namespace nrl::comm
