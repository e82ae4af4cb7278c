#pragma once
// A rank's coordinates in the process grid, computed without communication.

#include <string>
#include <string_view>
#include <vector>

#include "apps/model/spec/layout.h"
#include "core/config/config.h"
#include "core/tensor/tensor.h"
#include "parallel/data/flat_buckets.h"
#include "parallel/grid/grid.h"
#include "parallel/grid/groups.h"

namespace nrl::plan {

struct GridPosition {
  parallel::GridPoint sizes;                                            ///< of the dense grid
  parallel::GridPoint at{.tp = 0, .cp = 0, .ep = 0, .dp = 0, .pp = 0};  ///< this rank's coordinates

  parallel::ProcessGrid grid{{}, 1, 0};

  int ranks() const { return grid.ranks(); }
};

/// The configured grid. Data parallelism takes the remaining ranks.
parallel::GridSizes grid_sizes(const Config& config);
/// The position of `rank` in a world of `world` ranks. `config` must have passed validate_for_world().
GridPosition grid_position(const Config& config, int world, int rank);

/// distributed.tp_comm_overlap. auto: bulk on a GPU, where communication has processors of its own: it
/// changes no bits. none on a CPU, whose cores compute meanwhile.
TpCommOverlap tp_comm_overlap(const Config& config, DeviceType device);
/// This rank's part of the model.
model::ModelLayout model_layout(const Config& config, const model::ModelSpec& spec,
                                const GridPosition& position, DeviceType device);

/// The ranks that sum the gradients of a parameter group (model::group_name) and share its optimizer state.
parallel::GroupId reduction_group(std::string_view group);
/// The strategy of a parameter group. Two keep whole weights and gradients where others shard them. Tied
/// embeddings are needed, and their gradients complete, at different times on the first and the last pipeline
/// stage, which must not wait for each other there. Norms and routers, of whose gradients each
/// tensor-parallel rank has a part, are small: a collective over all ranks per layer and microbatch would
/// mostly be latency, so that they are reduced once per step. Biases of routers are whole with any strategy.
parallel::ShardingStrategy group_sharding(const parallel::ShardingStrategy& strategy, std::string_view group);
/// True for a group whose gradients are kept whole and in fp32 with any strategy.
bool reduced_once(std::string_view group);
/// All groups of ranks that a run of this configuration communicates in. `tied`: the model's embedding and
/// output projection share a weight.
std::vector<parallel::GroupId> needed_groups(const Config& config, const GridPosition& position, bool tied);
/// The channels in these groups: between pipeline stages.
std::vector<parallel::GroupChannels> needed_channels(const Config& config, const GridPosition& position);

/// For messages: "8 ranks = tp 2 x dp 4, ep 4  optim" without axes of size 1, or "1 rank". `experts`: sizes
/// of the expert grid.
std::string grid_line(const parallel::GridPoint& sizes, std::string_view strategy,
                      const parallel::GridPoint& experts = {});
std::string grid_line(const GridPosition& position, std::string_view strategy);

/// The first ranks of the first, the second and the last pipeline stage, ascending: the stages between need
/// what the second needs, or less.
std::vector<int> typical_ranks(const Config& config, int world);

}  // namespace nrl::plan
