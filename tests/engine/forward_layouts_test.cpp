// Engines for forward passes only, on several ranks: the bits of engines that train in the same layout, with
// memory for their part of the weights.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "apps/plan/forward_plan.h"
#include "tests/engine/layouts.h"

using namespace nrl;
using namespace nrl::test;

namespace {

using Keys = std::vector<std::string>;

std::vector<Keys> layouts(int ranks) {
  const std::string tensor = "distributed.tensor_parallel_size=",
                    stages = "distributed.pipeline_parallel_size=",
                    context = "distributed.context_parallel_size=",
                    shards = "distributed.shard_strategy=optim_grads_params";
  if (ranks == 1) return {{}};
  if (ranks == 2)
    return {{},
            {shards},
            {tensor + "2"},
            {stages + "2"},
            {stages + "2", "distributed.virtual_pipeline_size=2"},
            {context + "2"}};
  return {{tensor + "2", stages + "2"},
          {tensor + "2", shards},
          {stages + "2", shards},
          {context + "2", stages + "2"},
          {context + "2", tensor + "2"}};
}

std::unique_ptr<engine::Engine> forward_engine(train::Placement& placement, const ConfigResult& result,
                                               const plan::RunPlan& trained) {
  return std::make_unique<engine::Engine>(
      plan::make_forward_plan(trained.spec,
                              {.micro_batch = trained.batch.micro,
                               .sequence_length = trained.sequence_length,
                               .at_once = 4,
                               .recipe = trained.recipe,
                               .device = trained.device,
                               .threads = 1,
                               .products = placement.exec().kernels->bf16_products},
                              result.config, placement.grid_position()),
      placement.groups(), placement.exec());
}

void copy_weights(engine::Engine& from, engine::Engine& to) {
  REQUIRE(from.groups().size() == to.groups().size());
  for (size_t g = 0; g < from.groups().size(); ++g) {
    const Tensor &source = from.groups()[g].weights, &target = to.groups()[g].weights;
    REQUIRE(source.numel() == target.numel());
    if (source.numel() > 0) ops::upload(to.exec(), target, bytes_of(from, source).data());
  }
}

}  // namespace

TEST_CASE("forward engines of a layout have the bits of engines that train") {
  const int n = test_world().size();
  for (const std::string& model : {small_llama, small_qwen3})
    for (const Keys& layout : layouts(n)) {
      CAPTURE(model, layout);
      Keys keys = layout;
      keys.insert(keys.end(), {"policy.train_micro_batch_size=1", "policy.train_global_batch_size=16",
                               "policy.precision=float32", "policy.model.num_hidden_layers=4"});
      const ConfigResult config = tiny_config("cpu", keys, model);
      train::Placement placement(test_world(), config);
      const auto training = make_engine(placement, config);
      const plan::RunPlan& p = training->plan();
      const auto forward = forward_engine(placement, config, p);
      copy_weights(*training, *forward);
      // Full groups of microbatches, and what is left.
      for (const int64_t count : {int64_t{1}, int64_t{4}, int64_t{9}}) {
        const auto sum = [&](engine::Engine& engine) {
          int64_t m = 0;
          data::HostMicroBatch batch;
          return engine
              .evaluate(count,
                        [&]() -> const data::HostMicroBatch& {
                          batch = random_batch(
                              p.batch.micro * p.sequence_length,
                              static_cast<uint64_t>(100 * placement.grid_position().at.dp + m++));
                          return batch;
                        })
              .front();
        };
        const double want = sum(*training);
        CHECK(sum(*forward) == want);
        CHECK((want < 0) == p.layout.reports_tokens());
      }
      using memory::Category;
      const memory::MemoryPlan& memory = forward->plan().memory;
      CHECK(memory.bytes(Category::gradients) == 0);
      CHECK(memory.bytes(Category::optimizer) == 0);
      // Shards are gathered bucket by bucket.
      if (std::any_of(p.groups.begin(), p.groups.end(), [](const auto& g) { return g.weights_gathered; }))
        continue;
      CHECK(memory.bytes(Category::weights) == p.memory.bytes(Category::weights));
      if (p.layout.tensor * p.layout.stages > 1)
        CHECK(static_cast<double>(forward->plan().parameters.total()) <
              0.8 * static_cast<double>(p.whole().total()));
    }
}
