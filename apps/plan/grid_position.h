#pragma once
// A rank's coordinates in the process grid, computed without communication.

#include <string>
#include <string_view>

#include "core/config/config.h"
#include "parallel/grid/grid.h"

namespace nrl::plan {

struct GridPosition {
  parallel::GridPoint sizes;  ///< of the dense grid
  parallel::GridPoint at;     ///< this rank's coordinates

  int ranks() const { return parallel::RankGrid(sizes).ranks(); }
  /// Rank in the group dp-cp, which shares the optimizer state of dense parameters.
  int shard_rank() const { return at.cp + sizes.cp * at.dp; }
};

/// The configured grid. Data parallelism takes the remaining ranks.
parallel::GridSizes grid_sizes(const Config& config);
/// The position of `rank` in a world of `world` ranks. `config` must have passed validate_for_world().
GridPosition grid_position(const Config& config, int world, int rank);

/// For messages: "8 ranks = tp 2 x dp 4  optim" without axes of size 1, or "1 rank".
std::string grid_line(const parallel::GridPoint& sizes, std::string_view strategy);

}  // namespace nrl::plan
