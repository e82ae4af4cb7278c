#pragma once
// Benchmark of a group's collectives and messages.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "parallel/comm/communicator.h"

namespace nrl::comm {

/// One measurement. Bus bandwidth as nccl-tests defines it: bytes per second times 2(n-1)/n for all_reduce,
/// (n-1)/n for the other collectives, 1 for messages.
struct CommTiming {
  std::string op;  ///< "all_reduce", ..., "MPI_Allreduce" (the MPI library's own, for comparison)
  int64_t bytes = 0;
  double seconds = 0;  ///< per operation: the slowest rank's time, median over repetitions
  double bus_bytes_per_second = 0;
};

/// Times all_reduce, MPI_Allreduce (in MPI groups), reduce_scatter, all_gather, all_to_all and a simultaneous
/// exchange of ranks 0 and 1 on fp32 vectors of each size (rounded to a multiple of the group's size).
/// Collective; takes about `seconds_each` per line at most. All ranks get the same numbers.
std::vector<CommTiming> comm_benchmark(Communicator& group, std::span<const int64_t> sizes_bytes,
                                       double seconds_each = 0.2);

/// The table for the terminal.
std::string format_timings(std::span<const CommTiming> timings);

}  // namespace nrl::comm
