#pragma once

#include <cstdint>

namespace nrl::comm {

struct MpiOptions {
  /// Collectives within a host use shared memory from this many bytes per rank; below it, and across hosts,
  /// MPI messages. Results are bitwise identical.
  int64_t shared_min_bytes = 0;
  /// Staging memory of a group: at most four slots of this size per rank.
  int64_t shared_slot_bytes = 256 * 1024;
  /// A group's buffer for reductions through messages; longer vectors are reduced in chunks.
  int64_t scratch_bytes = 8 << 20;
};

}  // namespace nrl::comm
