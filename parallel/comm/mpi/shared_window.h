#pragma once
// Private to the MPI backend: collectives of one host through a shared staging window.
//
// Vectors pass in chunks through two slots per rank, in steps; between two steps is one barrier. In a step a
// rank fills a slot with its next chunk, reduces the chunk before, and fetches the result of the one before
// that. A slot is filled again two steps later, when every rank has passed the barrier that follows its last
// reading of it. The last step of a call has no barrier after it: the first step of the next call takes its
// place.

#include "parallel/comm/mpi/mpi_internal.h"

#include <atomic>
#include <cstdint>

namespace nrl::comm {

/// What a rank tells the others of its barriers; in shared memory.
struct Arrivals {
  std::atomic<uint32_t> count;     ///< barriers entered, modulo 2^32; a futex
  std::atomic<uint32_t> sleepers;  ///< ranks that may sleep on `count`
};

class SharedWindow {
 public:
  /// Collective over `comm`, whose ranks share a host. Null where the system refuses the memory (on any
  /// rank).
  static std::unique_ptr<SharedWindow> create(MPI_Comm comm, const MpiState& state);
  /// Collective.
  void free();

  void all_reduce(std::byte* data, int64_t count, DType dtype, Reduce op);
  void all_gather(const std::byte* in, std::byte* out, int64_t bytes);
  void reduce_scatter(const std::byte* in, std::byte* out, int64_t count, DType dtype, Reduce op);
  void broadcast(std::byte* data, int64_t bytes, int root);
  void barrier();

 private:
  SharedWindow(const MpiState& state, int rank, int size) : state_(state), rank_(rank), size_(size) {}

  template <class CopyIn, class Reduction, class CopyOut>
  void pipeline(int64_t chunks, int depth, CopyIn copy_in, Reduction reduction, CopyOut copy_out);
  std::byte* slot(int rank, int64_t parity) const;
  std::byte* result(int rank, int64_t parity) const;

  const MpiState& state_;
  int rank_, size_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  MPI_Win window_ = MPI_WIN_NULL;
  std::vector<std::byte*> segments_;  ///< of every rank, mapped here
  std::vector<Arrivals*> arrivals_;
  uint32_t arrived_ = 0;
  int64_t step_ = 0;
};

}  // namespace nrl::comm
