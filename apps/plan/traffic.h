#pragma once
// The communication of a training step, as engine::step_traffic() counts it.

#include <optional>
#include <span>
#include <vector>

#include "memory/host_copies.h"
#include "parallel/comm/ledger.h"
#include "parallel/grid/grid.h"

namespace nrl::plan {

/// The operations of one kind and purpose in one group during a step. `bytes` counts as in
/// comm::CollectiveLog.
struct Traffic {
  parallel::GroupId group;  ///< whose communicator is used (parallel::group_aliases())
  int ranks = 1;
  comm::Op op = comm::Op::all_reduce;
  comm::Purpose purpose = comm::Purpose::layers;
  int64_t count = 0, bytes = 0;

  /// True if the bytes depend on the router: they then assume that it sends as many tokens to every expert.
  bool balanced() const { return purpose == comm::Purpose::experts; }
  /// Bytes that a rank sends.
  double wire() const { return comm::wire_bytes(op, static_cast<double>(bytes), ranks); }
};

/// The groups of a step's operations.
struct TrafficGroup {
  parallel::GroupId id;
  int ranks = 1;
};

/// The start of an operation of a step, or the wait for it, between the step's calls of ops.
struct TrafficEvent {
  comm::Ledger::Event what;  ///< Event::group: index into the step's groups
  /// Set at the start of work with the host, for comm::Purpose::offload; it has no group, and `op` no
  /// meaning.
  std::optional<memory::HostWork> host = {};
  size_t calls = 0;     ///< ops::Call that come before it
  int step = -1;        ///< as ops::Call::step: of the program
  int microbatch = -1;  ///< as ops::Call::microbatch
};

/// Merges the operations of one kind in one group, whatever their purpose.
std::vector<Traffic> by_operation(std::span<const Traffic> traffic);

}  // namespace nrl::plan
