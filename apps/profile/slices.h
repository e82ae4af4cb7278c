#pragma once
// Tracks of a trace: viewers drop ranges of one track that overlap without being nested.

#include <cstdint>
#include <span>
#include <vector>

namespace nrl::profile {

/// A range of a track, in nanoseconds. `source` is the caller's index of what it shows.
struct Slice {
  int64_t begin = 0, end = 0;
  uint32_t source = 0;
};

/// The ranges such that any two are nested or disjoint, by begin, outer ones first. A range that ends after
/// the one around it begins only at the end of that one; device times need not nest. Ends before begins are
/// raised to them.
std::vector<Slice> nested(std::vector<Slice> slices);

/// A begin or an end of slices[index].
struct Edge {
  int64_t time = 0;
  uint32_t index = 0;
  bool begin = true;
};

/// Both edges of all slices, which must be as nested() returns them, in the order of a viewer: times ascend,
/// and an end closes the slice that was opened last.
std::vector<Edge> edges_of(std::span<const Slice> slices);

/// Distributes ranges among as few tracks as do not overlap: each range, by begin, takes the first track that
/// is free.
std::vector<std::vector<Slice>> lanes_of(std::vector<Slice> slices);

}  // namespace nrl::profile
