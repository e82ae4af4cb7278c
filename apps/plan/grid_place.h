#pragma once
// Where a rank stands in the process grid, by arithmetic alone: known before anything is planned or
// connected.

#include <string>
#include <string_view>

#include "core/config/config.h"
#include "parallel/grid/grid.h"

namespace nrl::plan {

struct GridPlace {
  GridPoint sizes;  ///< of the dense grid
  GridPoint at;     ///< this rank's coordinates

  int ranks() const { return RankGrid(sizes).ranks(); }
  /// Number of this rank among those that share the optimizer state of dense parameters (the group dp-cp).
  int shard_rank() const { return at.cp + sizes.cp * at.dp; }
};

/// The grid that a configuration gives. Data parallelism takes the ranks that the other axes leave.
GridSizes grid_sizes(const Config& config);
/// `rank` of `world`. `config` must have passed validate_for_world().
GridPlace grid_place(const Config& config, int world, int rank);

/// For people: "8 ranks = tp 2 x dp 4  optim", axes of size 1 left out; "1 rank".
std::string grid_line(const GridPoint& sizes, std::string_view strategy);

}  // namespace nrl::plan
