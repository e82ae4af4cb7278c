#include "apps/train/start/run_data.h"

#include "tests/catch.h"

using namespace nrl;

TEST_CASE("ranks that share a model replica read the same samples", "[train]") {
  Config config;
  config.distributed.context_parallel_size = 2;
  config.distributed.pipeline_parallel_size = 2;
  config.policy.train_global_batch_size = 24;
  config.policy.train_micro_batch_size = 2;
  constexpr int world = 12;
  const BatchPlan batch = resolve_batch(config, world);
  for (int rank = 0; rank < world; ++rank) {
    const plan::GridPosition position = plan::grid_position(config, world, rank);
    const data::LoaderOptions options = train::make_loader_options(config, batch, position);
    CAPTURE(rank);
    CHECK(options.data_parallel_rank == rank / 2 % 3);
    CHECK(options.data_parallel_size == 3);
    CHECK(options.global_batch() == 24);
  }
}
