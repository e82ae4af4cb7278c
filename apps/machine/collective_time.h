#pragma once
// The time of an operation of a group on a fabric.

#include <string_view>

#include "apps/machine/fabric.h"
#include "apps/machine/seconds.h"
#include "parallel/comm/ledger.h"

namespace nrl::machine {

struct CollectiveTime {
  Seconds time;
  double latency = 0;  ///< the seconds of `time` that do not depend on the bytes: launch and steps
  std::string_view algorithm;
};

/// The time of one operation of `bytes` (as comm::CollectiveLog counts them) in a group: the least over the
/// algorithms and protocols that NCCL, or MPI on CPUs, chooses from. With measurements of the operation
/// (Fabric::set_measured()) between its points linear in the logarithms of bytes and seconds; for other
/// numbers of ranks the bandwidth is kept and the steps are the model's. The link that it occupies is
/// link_of(crossing).
///
/// all_to_all and all_to_all_v exchange between all pairs: the own rank's part is free, parts for ranks of
/// the node go over NVLink, the others through the rank's own adapters. send, recv and exchange are one
/// message to a neighbor over the outermost level that the group crosses; both ends of a message take its
/// time. `across`: all-to-all: the part of what is for ranks of other nodes that crosses to them; the rest is
/// copied there.
CollectiveTime collective_time(const Fabric& fabric, const Crossing& crossing, comm::Op op, double bytes,
                               double across = 1);

/// `across` where a token goes once to each node that has some of its experts: `choices` of them, evenly on
/// the `nodes` on which they may be.
double once_to_each_node(double nodes, int64_t choices);

inline Seconds collective_seconds(const Fabric& fabric, const Crossing& crossing, comm::Op op, double bytes) {
  return collective_time(fabric, crossing, op, bytes).time;
}

/// The operation whose pattern an operation has: the exchanges of experts' rows are between all pairs.
constexpr comm::Op pattern_of(comm::Op op, comm::Purpose purpose) {
  return op == comm::Op::exchange && purpose == comm::Purpose::experts ? comm::Op::all_to_all : op;
}

}  // namespace nrl::machine
