// Checkpoints that are saved from a snapshot in a thread while the next steps run have the bytes of a save
// that the steps wait for, on a CPU and on a simulated GPU.
#include "apps/state/snapshot.h"

#include <filesystem>

#include "apps/plan/snapshot.h"
#include "apps/state/async_saver.h"
#include "apps/state/checkpoint.h"
#include "apps/state/rank_group.h"
#include "apps/state/run_state.h"
#include "core/io/checkpoint_store.h"
#include "tests/comm/shared_directory.h"
#include "tests/comm/world_fixture.h"
#include "tests/engine/training.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::test;

namespace {

struct Case {
  std::string device, strategy = "ddp";
  std::vector<std::string> more = {};
};

std::vector<Case> cases(int ranks) {
  std::vector<Case> out;
  for (const std::string device : {"cpu", "cuda"}) {
    for (const std::string strategy : {"ddp", "optim", "optim_grads", "optim_grads_params"})
      out.push_back({device, strategy});
    out.push_back({device, "ddp", {"policy.precision=bfloat16"}});
    out.push_back({device,
                   "optim",
                   {"policy.precision=bfloat16", "policy.optimizer.use_precision_aware_optimizer=true",
                    "policy.optimizer.exp_avg_dtype=fp8", "policy.optimizer.exp_avg_sq_dtype=fp16"}});
    out.push_back({device, "ddp", {"checkpointing.save_optimizer=false"}});
    if (ranks == 1) continue;
    out.push_back({device, "ddp", {"distributed.tensor_parallel_size=2"}});
    out.push_back({device, "optim", {"distributed.pipeline_parallel_size=2"}});
    out.push_back({device, "optim_grads_params", {"distributed.overlap_param_gather=true"}});
    if (ranks == 4)
      out.push_back(
          {device, "optim", {"distributed.tensor_parallel_size=2", "distributed.dp_replicate_size=2"}});
  }
  return out;
}

}  // namespace

TEST_CASE("a checkpoint saved beside the steps has the bytes of one saved at once", "[snapshot]") {
  comm::World& world = test_world();
  const SharedDirectory shared(world.comm());
  int number = 0, several = 0;
  for (const Case& c : cases(world.size())) {
    CAPTURE(c.device, c.strategy, c.more);
    std::vector<std::string> overrides{"distributed.shard_strategy=" + c.strategy,
                                       fmt::format("policy.train_global_batch_size={}", world.size()),
                                       "policy.train_micro_batch_size=1",
                                       "policy.model.hidden_size=128",
                                       "policy.model.vocab_size=8192",
                                       "policy.model.tie_word_embeddings=false",
                                       "checkpointing.save_period=1",
                                       "distributed.bucket_size_mb=0.3"};
    if (c.device == "cuda") overrides.push_back("kernels.share_device=true");
    overrides.insert(overrides.end(), c.more.begin(), c.more.end());
    const ConfigResult config = tiny_config(c.device, overrides);
    train::Placement placement(world, config);
    const auto engine = make_engine(placement, config);
    const int data = resolve_batch(config.config, world.size()).data_parallel;
    int64_t step = 0;
    const auto train = [&] {
      const int64_t microbatches = resolve_batch(config.config, world.size()).accumulation;
      for (int64_t m = 0; m < microbatches; ++m)
        engine->fill(
            m,
            random_batch(T, static_cast<uint64_t>(100 * step + m * data + placement.grid_position().at.dp)),
            m);
      ++step;
      engine->step({.number = step, .learning_rate = 1e-2, .loss_tokens = T * world.size()},
                   engine->objective());
    };
    train();
    engine->collect();
    engine->finish_gathers();

    train::SaveOptions options;
    options.store = fmt::format("{}/at-once-{}", shared.path, number);
    options.optimizer = config.config.checkpointing.save_optimizer;
    options.resolved_config = "a: b\n";
    options.run = JsonValue::object({});
    const train::Position position{.step = 1, .updates = 1, .consumed_samples = 8, .tokens = 64};
    std::string path;
    {
      const auto staging = engine->staging();
      path = train::save_checkpoint(train::state_of(*engine, staging.get()), position, options,
                                    train::rank_group(world.comm()));
    }
    auto snapshot = std::make_unique<train::Snapshot>(*engine, options.optimizer);
    CHECK(snapshot->bytes() == plan::snapshot_bytes(config.config, engine->plan()));
    train::AsyncSaver saver(world, std::move(snapshot), engine->exec().device);
    options.store = fmt::format("{}/beside-{}", shared.path, number++);
    const train::TrainState state = train::state_of(*engine, nullptr);
    saver.start(1, [&](train::Snapshot& copy, const RankGroup& ranks) {
      train::TrainState of_copy = state;
      of_copy.snapshot = &copy;
      return train::save_checkpoint(of_copy, position, options, ranks);
    });
    saver.release(true);
    for (int i = 0; i < 2; ++i) {
      train();
      engine->collect();
    }
    const train::SaveOutcome outcome = saver.join();
    INFO((outcome.error ? outcome.error->what() : ""));
    REQUIRE(!outcome.error);
    engine->finish_gathers();
    if (world.rank() == 0) {
      const std::vector<std::string> files = list_directory(path);
      REQUIRE(files == list_directory(outcome.path));
      for (const std::string& file : files) {
        CAPTURE(file);
        const bool same = read_file(path + "/" + file, uint64_t{1} << 30) ==
                          read_file(outcome.path + "/" + file, uint64_t{1} << 30);
        REQUIRE(same);
        several += file.starts_with("model-00002") ? 1 : 0;
      }
      REQUIRE(validate_checkpoint(path, Validation::full).empty());
      std::filesystem::remove_all(options.store);
    }
    world.comm().barrier();
  }
  // Replicas share the writing.
  if (world.rank() == 0 && world.size() > 1) CHECK(several > 8);
}

TEST_CASE("an error of a save beside the steps is that of all ranks", "[snapshot]") {
  comm::World& world = test_world();
  const SharedDirectory shared(world.comm());
  const ConfigResult config = tiny_config(
      "cpu",
      {fmt::format("policy.train_global_batch_size={}", world.size()), "policy.train_micro_batch_size=1"});
  train::Placement placement(world, config);
  const auto engine = make_engine(placement, config);
  train::AsyncSaver saver(world, std::make_unique<train::Snapshot>(*engine, true), nullptr);
  train::SaveOptions options;
  options.store = shared.path + "/store";
  options.resolved_config = "a: b\n";
  options.run = JsonValue::object({});
  const train::TrainState state = train::state_of(*engine, nullptr);
  for (const bool fails : {true, false}) {
    options.before_commit = [&] {
      if (fails) fail(Exit::cannot_create, "the lock is lost");
    };
    saver.start(7, [&](train::Snapshot& copy, const RankGroup& ranks) {
      train::TrainState of_copy = state;
      of_copy.snapshot = &copy;
      return train::save_checkpoint(of_copy, {.step = 7, .updates = 7}, options, ranks);
    });
    saver.release(true);
    const train::SaveOutcome outcome = saver.join();
    REQUIRE(!saver.in_flight());
    REQUIRE(outcome.step == 7);
    REQUIRE(outcome.error.has_value() == fails);
    if (fails) {
      REQUIRE(outcome.error->code() == Exit::cannot_create);
      if (world.rank() == 0) REQUIRE(list_directory(options.store).empty());
    }
    world.comm().barrier();
  }
  // A start that another rank could not make.
  saver.start(
      8, [](train::Snapshot&, const RankGroup&) -> std::string { fail(Exit::internal, "must not run"); });
  saver.release(false);
  REQUIRE(!saver.in_flight());
}
