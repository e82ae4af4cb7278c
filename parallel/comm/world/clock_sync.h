#pragma once
// Offsets between the steady clocks of ranks. Clocks of different machines, and of containers with time
// namespaces, have nothing in common.

#include <cstdint>
#include <functional>
#include <string>

#include "parallel/comm/communicator.h"

namespace nrl::comm {

/// Names the steady clock of this process: equal for the processes of a machine that share one.
std::string clock_identity();

/// `ns` is added to times of this rank's clock to get times of rank 0's clock, from which they then differ by
/// `error_ns` at most; 0 where it is one clock. Quartz drifts apart by up to 50 us per second afterwards.
struct ClockOffset {
  int64_t ns = 0, error_ns = 0;
};

/// Collective over `ranks`, which must be for host memory. One rank of each clock exchanges `rounds` messages
/// with rank 0: a reading of rank 0 lies between the sending of the question and the arrival of its answer,
/// so that unequal delays widen the error, and do not escape it. `now`: for tests.
ClockOffset clock_offset(Communicator& ranks, const std::string& identity = clock_identity(),
                         const std::function<int64_t()>& now = now_ns, int rounds = 32);

}  // namespace nrl::comm
