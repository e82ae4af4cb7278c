// A pipeline of stages trains and evaluates like one rank.
#include <cmath>
#include <map>

#include "apps/train/state/checkpoint.h"
#include "core/ops/step.h"
#include "parallel/comm/agreement.h"
#include "tests/comm/fifo_comm.h"
#include "tests/comm/time_limit.h"
#include "tests/comm/world_fixture.h"
#include "tests/engine/training.h"

using namespace nrl;
using namespace nrl::test;

namespace {

constexpr int steps = 3;

const char* const llama =
    "{model_type: llama, vocab_size: 61, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 8,\n"
    "          num_attention_heads: 2, num_key_value_heads: 1, max_position_embeddings: 64}";
const char* const gpt2 =
    "{model_type: gpt2, vocab_size: 61, n_embd: 16, n_layer: 8, n_head: 2, n_positions: 16,\n"
    "          resid_pdrop: 0.1, embd_pdrop: 0.1, attn_pdrop: 0.1}";

struct Setup {
  const char* model = llama;
  int stages = 1, chunks = 1;
  std::string schedule = "auto";
  int microbatches = 4;  ///< of the whole model, over all data-parallel ranks
  std::vector<std::string> more = {};
  std::string device = "cpu";

  std::string text() const {
    std::string all = fmt::format("{} stages of {} chunks, {}, {} microbatches on {}", stages, chunks,
                                  schedule, microbatches, device);
    for (const std::string& key : more) all += " " + key;
    return all + (model == gpt2 ? " gpt2" : " llama");
  }
};

ConfigResult config_of(const Setup& s) {
  std::vector<std::string> keys{fmt::format("distributed.pipeline_parallel_size={}", s.stages),
                                fmt::format("distributed.virtual_pipeline_size={}", s.chunks),
                                "distributed.pipeline_schedule=" + s.schedule,
                                "distributed.bucket_size_mb=0.01", "policy.train_micro_batch_size=1",
                                fmt::format("policy.train_global_batch_size={}", s.microbatches),
                                "policy.max_grad_norm=null",
                                // Small gradients must not become steps of full size in a random direction.
                                "policy.optimizer.eps=1e-3"};
  keys.insert(keys.end(), s.more.begin(), s.more.end());
  if (s.device == "cuda") keys.insert(keys.end(), {"kernels.share_device=true", "policy.precision=float32"});
  return tiny_config(s.device, keys, s.model);
}

/// Weights by logical tensor.
using Weights = std::map<std::string, std::vector<float>>;

struct Trained {
  std::vector<double> losses, norms, evaluations;
  Weights weights;
};

/// Trains on microbatches of all data-parallel ranks.
class Trainer {
 public:
  Trainer(const Setup& setup, train::Placement& placement, const parallel::Groups& groups,
          const plan::GridPosition& position)
      : microbatches_(setup.microbatches), position_(position), config_(config_of(setup)) {
    const Config& c = config_.config;
    engine_ = std::make_unique<engine::Engine>(
        plan::make_run_plan(c, train::load_model_spec(config_), resolve_batch(c, position.ranks()), position,
                            placement.device(), 1),
        engine::training_options(c), groups, placement.exec());
    train::StartPhases phases;
    train::load_initial_weights(c, *engine_, train::verify_none, 1, phases);
    engine_->require_kernels(objective_, "the device");
  }

  Trained run(comm::Communicator& all) {
    Trained out;
    const int dp = position_.sizes.dp;
    for (int step = 0; step < steps; ++step) {
      for (int m = 0; m < microbatches_ / dp; ++m) {
        const int sample = m * dp + position_.at.dp;
        engine_->fill(m, batch(100 * step + sample), sample);
      }
      engine_->step({.number = step + 1, .learning_rate = 1e-2, .loss_tokens = T * microbatches_},
                    objective_);
      const engine::StepResult result = engine_->collect();
      REQUIRE_FALSE(result.skipped);
      out.losses.push_back(result.metrics[0]);
      out.norms.push_back(result.grad_norm);
    }
    engine_->finish_gathers();
    // As many as the pipeline takes at once, fewer, and more.
    for (const int count : {microbatches_ / dp, 1, microbatches_ / dp + 1}) {
      data::HostMicroBatch next;
      int made = 0;
      double sum = engine_->evaluate(
          count, [&]() -> const data::HostMicroBatch& { return next = batch(10000 + made++); });
      all.all_reduce(std::span(&sum, 1));
      out.evaluations.push_back(sum / dp);
    }
    for (const engine::WeightSlice& w : engine_->weight_slices()) {
      const std::vector<char> bytes = bytes_of(*engine_, w.values);
      std::vector<float>& values = out.weights[w.part.name];
      values.resize(static_cast<size_t>(w.part.global[0] * w.part.width()));
      for (int64_t i = 0; i < w.part.numel(); ++i)
        std::memcpy(&values[static_cast<size_t>(w.part.element(i))], bytes.data() + 4 * i, 4);
    }
    return out;
  }

  const plan::RunPlan& plan() const { return engine_->plan(); }

 private:
  static data::HostMicroBatch batch(int seed) { return random_batch(T, static_cast<uint64_t>(seed)); }

  int microbatches_;
  plan::GridPosition position_;
  ConfigResult config_;
  engine::LanguageModeling objective_;
  std::unique_ptr<engine::Engine> engine_;
};

/// The same model on this rank alone.
Trained one_rank(Setup setup, train::Placement& placement) {
  std::erase_if(setup.more, [](const std::string& key) { return key.starts_with("distributed."); });
  setup.stages = setup.chunks = 1;
  setup.schedule = "auto";
  comm::Communicator& world = test_world().comm();
  const auto alone = world.split(world.rank(), 0, "alone");
  const ConfigResult config = config_of(setup);
  const plan::GridPosition position = plan::grid_position(config.config, 1, 0);
  std::optional<parallel::DeviceGroups> device;
  if (device::Runtime* const runtime = placement.exec().device)
    device = parallel::DeviceGroups{comm::DeviceCommKind::staged, runtime};
  const parallel::Groups groups(position.grid, *alone, train::groups_of_run(config, position), device);
  return Trainer(setup, placement, groups, position).run(*alone);
}

/// `exact`: sums have the same order as on one rank.
void compare(const Setup& setup, bool exact) {
  INFO(setup.text());
  const ConfigResult config = config_of(setup);
  train::Placement placement(test_world(), config);
  Trainer stage(setup, placement, placement.groups(), placement.grid_position());
  const Trained got = stage.run(placement.groups().host(parallel::group::all));
  const Trained want = one_rank(setup, placement);
  const auto near = [&](double a, double b, double relative) {
    INFO(fmt::format("{} against {}", a, b));
    CHECK(std::abs(a - b) <= relative * std::abs(b));
  };
  for (int i = 0; i < steps; ++i) {
    const auto at = static_cast<size_t>(i);
    near(got.losses[at], want.losses[at], exact ? 0 : 1e-6);
    near(got.norms[at], want.norms[at], exact ? 1e-14 : 1e-5);  // the stages' squares are added at last
  }
  // Data-parallel ranks evaluate equal batches here.
  for (size_t i = 0; i < want.evaluations.size(); ++i)
    if (placement.grid_position().sizes.dp == 1)
      near(got.evaluations[i], want.evaluations[i], exact ? 0 : 1e-5);
  // A model this small may lie in one shard.
  if (!stage.plan().groups.front().weights_sharded) REQUIRE(!got.weights.empty());
  for (const auto& [name, values] : got.weights) {
    INFO(name);
    const std::vector<float>& expected = want.weights.at(name);
    if (exact) {
      CHECK((values == expected));
      continue;
    }
    double worst = 0;
    for (size_t i = 0; i < values.size(); ++i)
      worst = std::max(worst, static_cast<double>(std::abs(values[i] - expected[i])));
    CHECK(worst <= 1e-5);  // of steps of 1e-2
  }
}

}  // namespace

TEST_CASE("every schedule of a pipeline has the bits of one rank") {
  const int n = test_world().size();
  for (const int microbatches : {1, 2, 3, 8})
    for (const auto& [schedule, chunks] :
         {std::pair("1f1b", 1), std::pair("zb_h1", 1), std::pair("interleaved", 2)}) {
      if (n == 1) continue;
      compare({.stages = n, .chunks = chunks, .schedule = schedule, .microbatches = microbatches}, true);
    }
}

TEST_CASE("messages in advance and larger groups of microbatches change nothing") {
  const int n = test_world().size();
  if (n == 1) return;
  const std::string overlap = "distributed.overlap_p2p_comm=true";
  for (const int microbatches : {1, 3, 8})
    for (const auto& [schedule, chunks] :
         {std::pair("1f1b", 1), std::pair("zb_h1", 1), std::pair("interleaved", 2)})
      compare({.stages = n,
               .chunks = chunks,
               .schedule = schedule,
               .microbatches = microbatches,
               .more = {overlap}},
              true);
  for (const int group : {n, 4, 8})
    for (const std::string& more : {overlap, std::string("distributed.overlap_p2p_comm=false")})
      if (8 % group == 0 || 8 % group >= n)
        compare({.stages = n,
                 .chunks = 2,
                 .microbatches = 8,
                 .more = {fmt::format("distributed.microbatch_group_size_per_vp_stage={}", group), more}},
                true);
}

TEST_CASE("a tied embedding on the first and the last stage is one parameter") {
  const int n = test_world().size();
  if (n == 1) return;
  for (const auto& [schedule, chunks] :
       {std::pair("1f1b", 1), std::pair("zb_h1", 1), std::pair("interleaved", 2)})
    for (const int microbatches : {1, 5})
      compare(
          {.model = gpt2, .stages = n, .chunks = chunks, .schedule = schedule, .microbatches = microbatches},
          false);
}

TEST_CASE("pipelines with data parallelism, recomputation, clipping and uneven stages") {
  const int n = test_world().size();
  if (n == 1) return;
  for (const std::string recompute :
       {"recompute.granularity=none", "recompute.granularity=selective", "recompute.granularity=full",
        "checkpoint_ratio=0.5", "checkpoint_every=2"})
    for (const std::string schedule : {"1f1b", "zb_h1"})
      compare({.stages = n, .schedule = schedule, .more = {"policy." + recompute}}, true);
  compare({.stages = n, .more = {"policy.max_grad_norm=0.01"}}, false);
  if (n == 2)
    for (const std::string layout : {"[8,0]", "[1,7]", "[0,8]"})
      compare({.stages = n, .more = {"distributed.pipeline_layout=" + layout}}, true);
  if (n < 4)
    compare({.stages = n, .chunks = 2, .more = {"distributed.num_layers_in_first_pipeline_stage=2"}}, true);
  compare({.stages = n,
           .chunks = 2,
           .more = {"distributed.account_for_embedding_in_pipeline_split=true",
                    "distributed.account_for_loss_in_pipeline_split=true"}},
          true);
  if (n < 4) return;
  for (const std::string strategy : {"ddp", "optim", "optim_grads_params"})
    for (const char* model : {llama, gpt2})
      compare({.model = model,
               .stages = 2,
               .microbatches = 8,
               .more = {"distributed.shard_strategy=" + strategy}},
              false);
  for (const std::string strategy : {"optim_grads", "optim_grads_params"})
    for (const auto& [schedule, chunks] : {std::pair("zb_h1", 1), std::pair("interleaved", 2)})
      for (const int microbatches : {6, 14})
        compare({.stages = 2,
                 .chunks = chunks,
                 .schedule = schedule,
                 .microbatches = microbatches,
                 .more = {"distributed.shard_strategy=" + strategy,
                          fmt::format("distributed.overlap_param_gather={}", strategy != "optim_grads"),
                          fmt::format("distributed.overlap_p2p_comm={}", microbatches == 6)}},
                false);
}

TEST_CASE("pipelines on simulated GPUs") {
  const int n = test_world().size();
  if (n == 1 || n > 3) return;
  for (const auto& [schedule, chunks] :
       {std::pair("1f1b", 1), std::pair("zb_h1", 1), std::pair("interleaved", 2)})
    for (const std::string overlap : {"false", "true"})
      compare({.stages = n,
               .chunks = chunks,
               .schedule = schedule,
               .microbatches = 3,
               .more = {"distributed.overlap_p2p_comm=" + overlap},
               .device = "cuda"},
              true);
}

TEST_CASE("a stage that is out of memory is an error on all ranks, which then train with less") {
  const int n = test_world().size(), me = test_world().rank();
  if (n == 1) return;
  std::vector<Setup> setups{{.stages = n}, {.stages = n, .chunks = 2, .microbatches = 8}};
  if (n == 4) setups.insert(setups.end(), {{.stages = 2}, {.stages = 2, .chunks = 2, .microbatches = 8}});
  for (const Setup& setup : setups) {
    INFO(setup.text());
    const TimeLimit limit("a rank out of memory in " + setup.text(), std::chrono::seconds(120));
    // Its channels are communicators of two ranks, as with nccl.
    FifoCommunicator world(test_world().comm().split(0, me, "fifo"));
    // More than any address space has.
    Setup large = setup;
    for (const char* key : {"policy.model.hidden_size=2048", "policy.model.num_attention_heads=16",
                            "policy.model.intermediate_size=2048", "policy.max_total_sequence_length=1048576",
                            "policy.model.max_position_embeddings=1048576",
                            "policy.train_micro_batch_size=2048", "policy.recompute.granularity=none"})
      large.more.emplace_back(key);
    large.microbatches *= 2048;
    const ConfigResult config = config_of(setup), too_large = config_of(large);
    const plan::GridPosition position = plan::grid_position(config.config, n, me);
    train::Placement placement(test_world(), config);
    const parallel::Groups groups(position.grid, world, train::groups_of_run(config, position), std::nullopt,
                                  plan::needed_channels(config.config, position));
    for (int victim = 0; victim < n; ++victim) {
      std::unique_ptr<engine::Engine> engine;
      const comm::ErrorConsensus vote = comm::attempt_on_all(world, [&] {
        const ConfigResult& own = me == victim ? too_large : config;
        engine = std::make_unique<engine::Engine>(
            plan::make_run_plan(own.config, train::load_model_spec(own), resolve_batch(own.config, n),
                                position, DeviceType::cpu, 1),
            engine::training_options(own.config), groups, placement.exec());
      });
      INFO(vote.message);
      REQUIRE(vote.code == Exit::out_of_memory);
      REQUIRE(vote.rank == victim);
      REQUIRE((engine == nullptr) == (me == victim));
    }
    const Trained got = Trainer(setup, placement, groups, position).run(world);
    CHECK(got.losses.front() == Approx(one_rank(setup, placement).losses.front()));
  }
}

TEST_CASE("a stage has memory for its layers and the microbatches in flight") {
  const int n = test_world().size();
  if (n == 1) return;
  const ConfigResult config =
      config_of({.stages = n, .microbatches = 2 * n, .more = {"policy.model.num_hidden_layers=12"}});
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
    CHECK(activations[static_cast<size_t>(rank)] < activations[static_cast<size_t>(rank - 1)]);
  CHECK(weights.front() < 2 * weights[1]);
}
