#pragma once

#include <cstdint>
#include <vector>

#include "parallel/comm/collective_log.h"

namespace nrl::comm {

struct MpiOptions {
  /// Ranks of a host use shared memory in collectives from this many bytes per rank; below it, and between
  /// hosts, MPI messages. Results are bitwise identical.
  int64_t shared_min_bytes = 0;
  /// Staging memory of a group: at most four slots of this size per rank.
  int64_t shared_slot_bytes = 256 * 1024;
  /// A group's buffer for reductions through messages; longer vectors are reduced in chunks.
  int64_t scratch_bytes = 8 << 20;
  /// For tests: the host of each launched rank, as any number. Ranks of one machine then behave like ranks of
  /// several. Empty: the hosts they run on.
  std::vector<int> hosts;
};

/// Resident memory of MPI in a process that it has connected to others: code and data of its components.
/// Measured with Open MPI 4.1 on one host.
inline constexpr int64_t mpi_resident_bytes = 10 << 20;

/// Bytes of a group's shared memory that one process touches in collectives of `bytes` bytes (as in
/// CollectiveLog) among `ranks` ranks of one host; 0 for operations that send messages.
int64_t shared_window_bytes(const MpiOptions& options, Op op, int64_t bytes, int ranks);
/// The same for a group on several hosts, `ranks` of which are on this one.
int64_t spanning_window_bytes(const MpiOptions& options, Op op, int64_t bytes, int ranks);

}  // namespace nrl::comm
