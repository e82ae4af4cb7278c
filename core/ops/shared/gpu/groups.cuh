#pragma once
// Tiles of rows of groups whose sizes only the GPU knows: groups are [offsets[g], offsets[g + 1]), and tiles
// are numbered group by group.

#include "core/device/kernel.h"

namespace nrl::ops::NRL_GPU {

/// A tile's group, the group's rows, and the number of the tile within it.
struct GroupTile {
  int group = 0;
  int64_t begin = 0, rows = 0;
  int tile = 0;
};

/// Calls found(GroupTile) for tile number `tile` of `size` rows, unless there are fewer. Whole warps must
/// call it; their lanes look at 32 groups at a time.
template <class Found>
__device__ __forceinline__ void with_tile(const int* offsets, int groups, int size, int64_t tile,
                                          const Found& found) {
  using kernel::all_lanes;
  using kernel::warp;
  const int lane = static_cast<int>(threadIdx.x) % warp;
  int64_t first = 0;  // tile of group `base`
  for (int base = 0; base < groups; base += warp) {
    const int g = base + lane;
    const int begin = g < groups ? offsets[g] : 0, end = g < groups ? offsets[g + 1] : 0;
    const int tiles = (end - begin + size - 1) / size;
    int sum = tiles;
#pragma unroll
    for (int o = 1; o < warp; o <<= 1) {
      const int below = __shfl_up_sync(all_lanes, sum, o);
      if (lane >= o) sum += below;
    }
    const int64_t mine = tile - (first + sum - tiles);
    const unsigned owners = __ballot_sync(all_lanes, mine >= 0 && mine < tiles);
    if (owners != 0) {
      const int owner = __ffs(static_cast<int>(owners)) - 1;
      const int64_t start = __shfl_sync(all_lanes, begin, owner);
      found(GroupTile{base + owner, start, __shfl_sync(all_lanes, end, owner) - start,
                      __shfl_sync(all_lanes, static_cast<int>(mine), owner)});
      return;
    }
    first += __shfl_sync(all_lanes, sum, warp - 1);
  }
}

/// The same; without rows where there is no such tile.
__device__ __forceinline__ GroupTile find_tile(const int* offsets, int groups, int size, int64_t tile) {
  GroupTile out;
  with_tile(offsets, groups, size, tile, [&](const GroupTile& t) { out = t; });
  return out;
}

/// Tiles of `size` rows that `groups` groups of together at most `rows` rows have: each may have one that is
/// not full.
inline int64_t most_tiles(int64_t rows, int64_t groups, int64_t size) {
  return rows < groups ? rows : rows / size + groups;
}

}  // namespace nrl::ops::NRL_GPU
