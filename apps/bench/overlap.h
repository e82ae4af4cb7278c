#pragma once
// Calls beside an operation of a group: the time that each of both loses.

#include <vector>

#include "apps/machine/profile.h"
#include "core/ops/exec.h"
#include "parallel/comm/communicator.h"

namespace nrl::bench {

/// A GEMM, attention and a norm, each beside an all_reduce, an all_gather and a reduce_scatter of `group`,
/// whose operations follow each other while the calls run: on a GPU in other streams than `exec`'s, on a CPU
/// in the thread of the executor. Medians of `rounds` rounds, in which every combination has its turn, and
/// means of the ranks. `quick`: tiny sizes, a call each. Empty for a group of one rank. Collective; all ranks
/// of the group get the same.
std::vector<machine::MeasuredOverlap> measure_overlap(comm::Communicator& group, const ops::Exec& exec,
                                                      int rounds, bool quick);

}  // namespace nrl::bench
