#pragma once

#include <cstdint>

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

}  // namespace nrl::comm
