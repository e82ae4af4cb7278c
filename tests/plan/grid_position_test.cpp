#include "apps/plan/grid_position.h"

#include <set>

#include "apps/plan/run_plan.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::plan;

TEST_CASE("the grid's line names the axes that several ranks share", "[plan]") {
  CHECK(grid_line({}, "ddp") == "1 rank");
  CHECK(grid_line({.dp = 8}, "optim") == "8 ranks = dp 8  optim");
  CHECK(grid_line({.tp = 2, .cp = 3, .dp = 4, .pp = 5}, "ddp") ==
        "120 ranks = tp 2 x cp 3 x dp 4 x pp 5  ddp");
}

TEST_CASE("a rank's grid position follows from the configuration and its rank", "[plan]") {
  Config config;
  config.distributed.tensor_parallel_size = 2;
  config.distributed.context_parallel_size = 2;
  config.distributed.pipeline_parallel_size = 2;
  std::map<std::pair<int, int>, std::set<int>> shards;  // of each (tp, pp)
  for (int rank = 0; rank < 24; ++rank) {
    const GridPosition position = grid_position(config, 24, rank);
    CHECK(position.sizes == parallel::GridPoint{.tp = 2, .cp = 2, .dp = 3, .pp = 2});
    CHECK(position.at ==
          parallel::GridPoint{
              .tp = rank % 2, .cp = rank / 2 % 2, .ep = 0, .dp = rank / 4 % 3, .pp = rank / 12});
    shards[{position.at.tp, position.at.pp}].insert(
        group_options(config, position, precision::float32, model::group_name::dense).shard_rank);
  }
  for (const auto& [stage, ranks] : shards) CHECK(ranks == std::set<int>{0, 1, 2, 3, 4, 5});
}
