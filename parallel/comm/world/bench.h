#pragma once
// Benchmark of a group's collectives and messages.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/device/runtime.h"
#include "parallel/comm/communicator.h"

namespace nrl::comm {

/// One measurement. Bus bandwidth as nccl-tests defines it: bytes per second times 2(n-1)/n for all_reduce,
/// (n-1)/n for the other collectives, 1 for messages.
struct CommTiming {
  std::string op;  ///< "all_reduce", ...
  DType dtype = DType::f32;
  int64_t bytes = 0;
  double seconds = 0;  ///< per operation: the slowest rank's time, median over rounds
  double bus_bytes_per_second = 0;
  /// The MPI library's own operation, measured in alternating rounds; 0 where there is none.
  double mpi_seconds = 0;
  /// Median over rounds of its time divided by ours; 0 where there is none.
  double speedup = 0;
};

/// Times all_reduce, reduce_scatter and all_gather, on f32 and bf16, all_to_all and a simultaneous exchange
/// of ranks 0 and 1, on vectors of each size (rounded to a multiple of the group's size). In MPI groups the
/// library's own all_reduce, reduce_scatter and all_gather are timed with them, in alternating rounds, so
/// that both meet the same load of the machine. A group for the memory of `device` is timed with vectors
/// there, and the host waits for every operation. Ends before a size whose calls would
/// take longer than a second. Collective; takes about `seconds_each` per line at most,
/// twice that with a comparison. All ranks get the same numbers.
std::vector<CommTiming> comm_benchmark(Communicator& group, std::span<const int64_t> sizes_bytes,
                                       double seconds_each = 0.2, device::Runtime* device = nullptr);

/// The table for the terminal.
std::string format_timings(std::span<const CommTiming> timings);

}  // namespace nrl::comm
