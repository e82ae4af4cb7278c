#pragma once
// The time that a rank needs for a list of calls and operations of groups, as a dry run finds them. Each of
// its resources does one thing at a time, in order: the processors, the links within a node, the network
// adapters, and those to its host (machine::Link). An operation starts when it is issued and its link is free
// of its kind; the rank goes on until it waits for it. Two kinds share a link, each at half the rate while
// both are on it: operations of layers, and those for gradients and weights. What overlaps with what thus
// follows from the code of the step alone, for every way in which layers, gathers of weights and reductions
// of gradients communicate.

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "apps/machine/fabric.h"
#include "apps/machine/overlap.h"
#include "parallel/comm/ledger.h"

namespace nrl::predict {

/// True for operations for gradients and weights, and for the gradient norm.
constexpr bool of_data(comm::Purpose p) {
  return p == comm::Purpose::gradients || p == comm::Purpose::weights || p == comm::Purpose::scalars;
}

/// One thing that a rank does.
struct Item {
  enum class Kind : uint8_t {
    call,   ///< computes
    start,  ///< issues an operation
    wait,   ///< waits for one
    until,  ///< waits until the time `seconds`, for another rank
  };
  Kind kind = Kind::call;
  int slot = 0;        ///< Replay::slots: where the time that passes is counted
  double seconds = 0;  ///< call: alone on the device; start: of the operation, alone on its link
  /// Call: before its kernels start. Start: processor time that issuing takes.
  double host = 0;
  /// Seconds of the host, which starts one item after another and may be ahead of the device; 0: it is.
  double issue = 0;
  bool host_waits = false;  ///< call: the host starts what follows when it has ended
  int operation = -1;  ///< start, wait: its number, memory is proportional to the largest; a wait for one
                       ///< without a start takes no time
  int after = -1;      ///< start: an operation that must end before; -1: none
  machine::Overlap::Row row = 0;                  ///< call
  comm::Op op = comm::Op::all_reduce;             ///< start
  machine::Link link = machine::Link::none;       ///< start
  comm::Purpose purpose = comm::Purpose::layers;  ///< start
  bool beside = false;  ///< start: nothing waits for it: shares its link as data does
  int source = -1;      ///< index that Span::source repeats
};

/// Seconds that resources are occupied.
struct Busy {
  double processors = 0;
  std::array<double, machine::link_count> links = {};  ///< by machine::Link

  double of(machine::Link link) const { return links[static_cast<size_t>(link)]; }
  double& of(machine::Link link) { return links[static_cast<size_t>(link)]; }
  double node() const { return of(machine::Link::node); }
  double adapter() const { return of(machine::Link::adapter); }
  /// Seconds of the resource that is occupied longest.
  double most() const;
  /// Sets each to the larger one.
  void raise(const Busy& other);
  Busy& operator+=(const Busy& other);
};

/// Seconds of a part of the list, by what the rank did. They add up to the time that passed.
struct SlotTime {
  double compute = 0;  ///< calls as if nothing else ran on the device
  double host = 0;     ///< gaps before kernels, and waiting for the host
  /// By comm::Purpose: waiting for operations, issuing them, and what calls lost while they were in flight.
  std::array<double, comm::purpose_count> exposed = {};
  Busy busy = {};  ///< by the items, whenever their operations run

  double total() const;
  /// In layers: tensor, context and expert parallelism.
  double layers() const { return of(comm::Purpose::layers) + of(comm::Purpose::experts); }
  /// For gradients and weights, and for the gradient norm.
  double data() const {
    return of(comm::Purpose::gradients) + of(comm::Purpose::weights) + of(comm::Purpose::scalars);
  }
  /// Copies to and from the host, and updates there.
  double offload() const { return of(comm::Purpose::offload); }
  double of(comm::Purpose p) const { return exposed[static_cast<size_t>(p)]; }
  SlotTime& operator+=(const SlotTime& other);
  SlotTime operator*(double factor) const;
};

/// An item on its resource.
struct Span {
  enum class Resource : uint8_t { processors, link, waits };  ///< waits: a wait that takes time
  Resource resource = Resource::processors;
  machine::Link link = machine::Link::none;
  double begin = 0, end = 0;
  int source = -1;
};

struct Replay {
  double end = 0;  ///< all items are done; operations that nothing waits for do not count
  std::vector<SlotTime> slots;
  Busy busy;
  std::vector<Span> spans;      ///< if asked for, by time on each resource
  std::vector<double> reached;  ///< when the rank went on after each item of kind `until`
};

/// `slots`: number of slots of the items. `overlap`: while a call and an operation run, both take longer. Of
/// several operations beside a call, the first one that was issued slows it.
Replay replay(std::span<const Item> items, size_t slots, const machine::Overlap& overlap, bool spans = false);

}  // namespace nrl::predict
