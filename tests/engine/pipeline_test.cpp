// Pipelines of stages: simulated GPUs have the bits of one rank, errors of one stage, and memory.
// tests/layouts compares all schedules with one rank.
#include "parallel/comm/agreement.h"
#include "tests/comm/fifo_comm.h"
#include "tests/comm/time_limit.h"
#include "tests/engine/layouts.h"

using namespace nrl;
using namespace nrl::test;

namespace {

using Keys = std::vector<std::string>;

Keys operator+(Keys a, const Keys& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// Without clipping, which would give the last bit of the norm to the weights.
ConfigResult stages(int count, const Keys& more, const std::string& device = "cpu") {
  return tiny_config(
      device,
      Keys{fmt::format("distributed.pipeline_parallel_size={}", count), "policy.model.num_hidden_layers=8",
           "policy.train_micro_batch_size=1", "policy.train_global_batch_size=8", "policy.max_grad_norm=null",
           "policy.precision=float32", "distributed.bucket_size_mb=0.01"} +
          more,
      small_llama);
}

}  // namespace

TEST_CASE("pipelines on simulated GPUs have the bits of one rank") {
  const int n = test_world().size();
  if (n > 3) return;
  const auto alone_ranks = test_world().comm().split(test_world().rank(), 0, "alone");
  const Keys few{"policy.train_global_batch_size=3"};
  const Learned want = Trainee(*alone_ranks, "cuda", stages(1, few, "cuda")).learn(3);
  for (const auto& [schedule, chunks] :
       {std::pair("1f1b", 1), std::pair("zb_h1", 1), std::pair("interleaved", 2)})
    for (const std::string overlap : {"false", "true"}) {
      CAPTURE(schedule, overlap);
      const Keys keys{fmt::format("distributed.pipeline_schedule={}", schedule),
                      fmt::format("distributed.virtual_pipeline_size={}", chunks),
                      "distributed.overlap_p2p_comm=" + overlap};
      const Learned got = Trainee(test_world().comm(), "cuda", stages(n, few + keys, "cuda")).learn(3);
      require_near(got.numbers, want.numbers, 1e-14);  // the stages' squares are added at last
      REQUIRE(!got.elements.empty());
      for (const auto& [name, elements] : got.elements) {
        INFO(name);
        CHECK((elements == want.elements.at(name)));
      }
    }
}

TEST_CASE("a stage that is out of memory is an error on all ranks, which then train with less") {
  const int n = test_world().size(), me = test_world().rank();
  const auto alone_ranks = test_world().comm().split(me, 0, "alone");
  std::vector<std::pair<int, Keys>> setups{{n, {}}, {n, {"distributed.virtual_pipeline_size=2"}}};
  if (n == 4) setups.insert(setups.end(), {{2, {}}, {2, {"distributed.virtual_pipeline_size=2"}}});
  for (const auto& [count, keys] : setups) {
    CAPTURE(count, keys);
    const TimeLimit limit("a rank out of memory", std::chrono::seconds(120));
    // Its channels are communicators of two ranks, as with nccl.
    FifoCommunicator world(test_world().comm().split(0, me, "fifo"));
    // More than any address space has.
    const Keys large{"policy.model.hidden_size=2048",
                     "policy.model.num_attention_heads=16",
                     "policy.model.intermediate_size=2048",
                     "policy.max_total_sequence_length=1048576",
                     "policy.model.max_position_embeddings=1048576",
                     "policy.train_micro_batch_size=2048",
                     "policy.train_global_batch_size=16384",
                     "policy.recompute.granularity=none"};
    const ConfigResult config = stages(count, keys), too_large = stages(count, keys + large);
    const plan::GridPosition position = plan::grid_position(config.config, n, me);
    train::Placement placement(test_world(), config);
    const parallel::Groups groups(position.grid, world, train::groups_of_run(config, position), std::nullopt,
                                  plan::needed_channels(config.config, position));
    const auto make = [&](const ConfigResult& own) {
      return std::make_unique<engine::Engine>(
          plan::make_run_plan(own.config, train::load_model_spec(own), resolve_batch(own.config, n), position,
                              DeviceType::cpu, 1),
          engine::training_options(own.config), groups, placement.exec());
    };
    for (int victim = 0; victim < n; ++victim) {
      std::unique_ptr<engine::Engine> engine;
      const comm::ErrorConsensus vote =
          comm::attempt_on_all(world, [&] { engine = make(me == victim ? too_large : config); });
      INFO(vote.message);
      REQUIRE(vote.code == Exit::out_of_memory);
      REQUIRE(vote.rank == victim);
      REQUIRE((engine == nullptr) == (me == victim));
    }
    const auto engine = make(config);
    monitor::StartPhases phases;
    train::load_initial_weights(config.config, *engine, train::verify_none, 1, phases);
    engine::LanguageModeling objective;
    const BatchPlan& batch = engine->plan().batch;
    for (int64_t m = 0; m < batch.accumulation; ++m) {
      const int64_t sample = m * position.sizes.dp + position.at.dp;
      engine->fill(m, random_batch(T, static_cast<uint64_t>(1000 + sample)),
                   sample);  // as a Trainee has them
    }
    engine->step({.number = 1, .learning_rate = 1e-2, .loss_tokens = batch.tokens_per_step}, objective);
    const double got = engine->collect().metrics[0];
    CHECK(got == Approx(Trainee(*alone_ranks, "cpu", stages(1, {})).train_step().metrics[0]));
  }
}

TEST_CASE("a stage has memory for its layers and the microbatches in flight") {
  const int n = test_world().size();
  if (n == 1) return;
  const ConfigResult config = stages(
      n, {fmt::format("policy.train_global_batch_size={}", 2 * n), "policy.model.num_hidden_layers=12"});
  std::vector<int64_t> activations, weights;
  int64_t layers = 0;
  for (int rank = 0; rank < n; ++rank) {
    const auto plan =
        plan::make_run_plan(config.config, train::load_model_spec(config), resolve_batch(config.config, n),
                            plan::grid_position(config.config, n, rank), DeviceType::cpu, 1);
    activations.push_back(plan->memory.bytes(memory::Category::activations));
    weights.push_back(plan->memory.bytes(memory::Category::weights));
    for (const model::LayerParameters& l : plan->parameters.layers) layers += l.qkv >= 0;
  }
  CHECK(layers == 12);
  for (int rank = 1; rank < n - 1; ++rank)  // one microbatch less in flight
    CHECK(activations[rank] < activations[rank - 1]);
  CHECK(weights.front() < 2 * weights[1]);
}
