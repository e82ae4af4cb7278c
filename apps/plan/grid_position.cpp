#include "apps/plan/grid_position.h"

#include <utility>

#include "core/base/error.h"

namespace nrl::plan {

parallel::GridSizes grid_sizes(const Config& config) {
  const DistributedConfig& d = config.distributed;
  return {.tp = static_cast<int>(d.tensor_parallel_size),
          .cp = static_cast<int>(d.context_parallel_size),
          .pp = static_cast<int>(d.pipeline_parallel_size),
          .ep = static_cast<int>(d.expert_parallel_size),
          .etp = static_cast<int>(d.expert_tensor_parallel_size)};
}

GridPosition grid_position(const Config& config, int world, int rank) {
  const parallel::GridSizes g = grid_sizes(config);
  const parallel::GridPoint sizes{
      .tp = g.tp, .cp = g.cp, .ep = 1, .dp = world / (g.tp * g.cp * g.pp), .pp = g.pp};
  return {sizes, parallel::RankGrid(sizes).coordinates(rank)};
}

std::string grid_line(const parallel::GridPoint& sizes, std::string_view strategy) {
  const int ranks = parallel::RankGrid(sizes).ranks();
  if (ranks == 1) return "1 rank";
  std::string axes;
  for (const auto& [name, size] :
       {std::pair("tp", sizes.tp), std::pair("cp", sizes.cp), std::pair("ep", sizes.ep),
        std::pair("dp", sizes.dp), std::pair("pp", sizes.pp)})
    if (size > 1) axes += fmt::format("{}{} {}", axes.empty() ? "" : " x ", name, size);
  return fmt::format("{} ranks = {}  {}", ranks, axes, strategy);
}

}  // namespace nrl::plan
