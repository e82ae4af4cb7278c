#include "apps/plan/grid_position.h"

#include <set>

#include "apps/model/spec/rank_groups.h"
#include "apps/plan/run_plan.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::plan;

TEST_CASE("the grid's line names the axes that several ranks share", "[plan]") {
  CHECK(grid_line(parallel::GridPoint{}, "ddp") == "1 rank");
  CHECK(grid_line({.dp = 8}, "optim") == "8 ranks = dp 8  optim");
  CHECK(grid_line({.tp = 2, .dp = 4}, "ddp", {.tp = 2, .ep = 4}) ==
        "8 ranks = tp 2 x dp 4, etp 2 x ep 4  ddp");
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

TEST_CASE("the groups of ranks that parameter groups use are created at start, the same on all ranks",
          "[plan]") {
  for (const ShardStrategy strategy :
       {ShardStrategy::ddp, ShardStrategy::optim, ShardStrategy::optim_grads_params, ShardStrategy::hsdp})
    for (const bool overlap : {false, true})
      for (const int replicas : {1, 2}) {
        if ((strategy == ShardStrategy::ddp && replicas > 1) ||
            (strategy == ShardStrategy::hsdp && replicas == 1))
          continue;
        CAPTURE(name_of(strategy), overlap, replicas);
        Config config;
        DistributedConfig& d = config.distributed;
        d.tensor_parallel_size = d.context_parallel_size = 2;
        d.pipeline_parallel_size = 3;
        d.shard_strategy = strategy;
        d.overlap_param_gather = overlap;
        d.dp_replicate_size = replicas;
        constexpr int world = 48;  // four data-parallel ranks
        const auto first = needed_groups(config, grid_position(config, world, 0), true);
        for (int rank = 0; rank < world; ++rank) {
          const GridPosition position = grid_position(config, world, rank);
          REQUIRE(needed_groups(config, position, true) == first);
          for (const parallel::GroupId& id : {model::microbatch_ranks(2, 2), model::batch_ranks(2)})
            REQUIRE(std::count(first.begin(), first.end(), id) == 1);
          for (const auto name : {model::group_name::dense, model::group_name::tensor_partial,
                                  model::group_name::tied, model::group_name::expert}) {
            const bool middle = position.at.pp == 1 && name == model::group_name::tied;
            if (middle) continue;  // it has no such parameters
            const GroupOptions o = group_options(config, position, precision::float32, name);
            ParamGroup g;
            g.reduce = o.reduce;
            g.replicas = o.replicas;
            g.overlap_gather = o.overlap_gather;
            g.layout = parallel::FlatBuckets({{"p", 5}}, 0, o.shards);
            const auto has = [&](const parallel::GroupId& id) {
              return std::count(first.begin(), first.end(), id) == 1;
            };
            REQUIRE(has(g.shard_group()));
            const std::vector<int> shards = position.grid.members(g.shard_group());
            REQUIRE(static_cast<int>(shards.size()) == o.shards);
            REQUIRE(shards[o.shard_rank] == rank);
            if (replicas > 1) {
              REQUIRE(has(g.replica_group()));
              const std::vector<int> copies = position.grid.members(g.replica_group());
              REQUIRE(static_cast<int>(copies.size()) == replicas);
              REQUIRE(copies[o.replica] == rank);
            }
            // Tied embeddings are on two stages that must not wait for each other within a step, and what
            // tensor-parallel ranks sum is small.
            REQUIRE((o.strategy.parameters || o.strategy.gradients) ==
                    (strategy != ShardStrategy::ddp && strategy != ShardStrategy::optim &&
                     name != model::group_name::tied && name != model::group_name::tensor_partial));
            if (o.strategy.parameters) REQUIRE(has(g.gather_group()));
            if (name == model::group_name::tied || name == model::group_name::tensor_partial)
              REQUIRE(!has(g.shard_group().on_lane(1)));
          }
        }
      }
}

TEST_CASE("automatic overlap of tensor-parallel communication is bulk on a GPU", "[plan]") {
  using enum TpCommOverlap;
  Config config;
  config.distributed.tensor_parallel_size = 2;
  const GridPosition position = grid_position(config, 2, 0);
  const auto chosen = [&](DeviceType device) {
    return model_layout(config, {}, position, device).overlap.method;
  };
  for (const bool fp8 : {false, true}) {
    CAPTURE(fp8);
    config.policy.fp8_cfg.enabled = fp8;
    CHECK(chosen(DeviceType::cuda) == bulk);
    CHECK(chosen(DeviceType::cpu) == none);
  }
  for (const TpCommOverlap given : {none, pipelined})
    for (const DeviceType device : {DeviceType::cpu, DeviceType::cuda}) {
      config.distributed.tp_comm_overlap = given;
      CHECK(chosen(device) == given);
    }
}
