// Weights that are kept in FP8 (policy.fp8_cfg.fp8_param), or rounded for each GEMM (cache_weights: false),
// train as weights that are gathered in policy.precision and rounded once in every step, bit by bit, with
// less memory, and kept ones with less communication. tests/layouts trains them in every layout.
#include <cstring>
#include <filesystem>

#include "apps/plan/traffic.h"
#include "apps/state/checkpoint.h"
#include "apps/state/rank_group.h"
#include "apps/state/run_state.h"
#include "tests/catch.h"
#include "tests/comm/shared_directory.h"
#include "tests/engine/layouts.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::test;

namespace {

using Keys = std::vector<std::string>;

Keys operator+(Keys a, const Keys& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

const Keys kept{"policy.fp8_cfg.fp8_param=true"}, cached{"policy.fp8_cfg.cache_weights=true"},
    rounded{"policy.fp8_cfg.cache_weights=false"};

/// Layers of several times FlatBuckets::shard_unit, so that shards cut matrices.
const std::string model =
    "{model_type: llama, vocab_size: 61, hidden_size: 128, intermediate_size: 256, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, head_dim: 32, max_position_embeddings: 256, "
    "initializer_range: 0.1, attention_bias: true}";
/// Padding is small beside these.
const std::string large =
    "{model_type: llama, vocab_size: 61, hidden_size: 256, intermediate_size: 1024, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 4, max_position_embeddings: 256}";
/// Blocks of 128 x 128 that two tensor-parallel ranks do not share.
const std::string divisible =
    "{model_type: llama, vocab_size: 61, hidden_size: 128, intermediate_size: 256, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 4, head_dim: 64, max_position_embeddings: 256, "
    "initializer_range: 0.1}";
/// For the simulated device.
const std::string small =
    "{model_type: llama, vocab_size: 61, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 4, head_dim: 16, max_position_embeddings: 64, "
    "initializer_range: 0.2}";

const std::string experts =
    "{model_type: mixtral, vocab_size: 61, hidden_size: 128, intermediate_size: 128, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 4, head_dim: 64, max_position_embeddings: 256, "
    "num_local_experts: 4, num_experts_per_tok: 2, initializer_range: 0.1}";

/// For the simulated device.
const std::string few_experts =
    "{model_type: mixtral, vocab_size: 61, hidden_size: 32, intermediate_size: 32, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 4, head_dim: 16, max_position_embeddings: 64, "
    "num_local_experts: 4, num_experts_per_tok: 2, initializer_range: 0.2}";

/// Blocks of 128 tokens of a microbatch have scales.
std::string length(const std::string& name, int tokens) {
  const bool blocks = name == "blockwise" || name == "mxfp8";
  return fmt::format("policy.max_total_sequence_length={}", blocks ? 8 * tokens : tokens);
}
Keys recipe(const std::string& name) {
  Keys keys{"policy.fp8_cfg.enabled=true",
            "policy.fp8_cfg.fp8_recipe=" + name,
            length(name, 16),
            "policy.train_micro_batch_size=1",
            "policy.train_global_batch_size=8",
            "distributed.bucket_size_mb=0.3"};
  if (name == "delayed") keys.push_back("policy.fp8_cfg.fp8_amax_history_len=2");
  return keys;
}
const std::vector<std::string> recipes{"tensorwise", "delayed", "blockwise"};

/// Of all ranks of the test.
struct Group {
  comm::Communicator& ranks = test_world().comm();
  std::string device = "cpu", shape = model;

  Trainee trainee(const Keys& keys) const { return {ranks, device, tiny_config(device, keys, shape)}; }
  Learned learn(const Keys& keys, int steps = 3) const { return trainee(keys).learn(steps); }
};

/// The numbers, and the elements that this rank has in both. Norms are sums in fp64 whose order depends on
/// the parameter groups.
void require_same(const Learned& got, const Learned& want) {
  REQUIRE(got.numbers.size() == want.numbers.size());
  for (size_t i = 0; i < got.numbers.size(); ++i) {
    const bool norm = i % 5 == 1 && i + 1 < got.numbers.size();
    CAPTURE(i, got.numbers[i] - want.numbers[i]);
    CHECK(std::fabs(got.numbers[i] - want.numbers[i]) <= (norm ? 1e-14 * want.numbers[i] : 0));
  }
  std::string different;
  double compared = 0;
  for (const auto& [name, elements] : got.elements)
    for (const auto& [element, value] : elements) {
      const auto tensor = want.elements.find(name);
      if (tensor == want.elements.end()) continue;
      const auto expected = tensor->second.find(element);
      if (expected == tensor->second.end()) continue;
      ++compared;
      if (std::memcmp(&value, &expected->second, sizeof value) != 0) different = name;
    }
  CHECK(different == "");
  test_world().comm().all_reduce(std::span(&compared, 1));  // a rank's shards may be padding
  CHECK(compared > 0);
}

Keys strategy(const std::string& name) {
  return {"distributed.shard_strategy=" + name};
}

}  // namespace

TEST_CASE("a GPU keeps weights in FP8", "[engine][fp8]") {
  if (test_world().size() > 2) return;
  for (const auto& [name, shards] :
       {std::pair{"tensorwise", "optim"}, {"delayed", "optim_grads_params"}, {"blockwise", "optim"}}) {
    CAPTURE(name, shards);
    const Group group{.device = "cuda", .shape = name == std::string("blockwise") ? divisible : small};
    const Keys keys = recipe(name) + strategy(shards) + Keys{"kernels.share_device=true"};
    require_same(group.learn(keys + kept, 2), group.learn(keys, 2));
  }
  if (test_world().size() > 1) return;
  const Group group{.device = "cuda", .shape = small};
  const Keys graph = recipe("tensorwise") + Keys{"policy.cuda_graph=true"};
  require_same(group.learn(graph + kept, 4), group.learn(graph, 4));
}

namespace {

/// Bytes of a step by operation, as planned; training with these keys compares them with the log.
std::map<comm::Op, int64_t> traffic(const Keys& keys) {
  const Group group{.shape = large};
  const Trainee trainee = group.trainee(keys);
  std::map<comm::Op, int64_t> out;
  for (const plan::Traffic& t : trainee.planned_traffic()) out[t.op] += t.bytes;
  return out;
}

/// Of the weights, and of everything. The arenas have exactly the planned size.
std::pair<int64_t, int64_t> planned_bytes(const Keys& keys) {
  const Group group{.shape = large};
  Trainee trainee = group.trainee(keys);
  const memory::MemoryPlan& plan = trainee.engine().plan().memory;
  return {plan.bytes(memory::Category::weights), plan.total_bytes()};
}

}  // namespace

TEST_CASE("weights in FP8 take the planned memory and communication, and less of both", "[engine][fp8]") {
  if (test_world().size() == 1) return;
  for (const std::string& name : recipes)
    for (const std::string shards : {"ddp", "optim", "optim_grads", "optim_grads_params"}) {
      CAPTURE(name, shards);
      const Keys keys = recipe(name) + strategy(shards) + Keys{"policy.precision=bfloat16"};
      std::map<comm::Op, int64_t> with = traffic(keys + kept), without = traffic(keys + cached);
      if (shards == "ddp") continue;
      const auto [gathered, gathered_before] =
          std::pair(with[comm::Op::all_gather], without[comm::Op::all_gather]);
      CHECK(gathered < gathered_before * 2 / 3);
      // Weights of 2 bytes and two copies in FP8 become one copy and, where they are updated, 2 bytes.
      const auto [weights, total] = planned_bytes(keys + kept);
      const auto [weights_before, total_before] = planned_bytes(keys + cached);
      CHECK(weights < weights_before * 2 / 3);
      CHECK(total < total_before);
    }
}

TEST_CASE("weights that are rounded for each GEMM train as those that are rounded once", "[engine][fp8]") {
  const int ranks = test_world().size();
  const Keys tensor = ranks > 1 ? Keys{"distributed.tensor_parallel_size=2"} : Keys{},
             exchange = ranks > 1 ? Keys{"distributed.expert_parallel_size=2"} : Keys{},
             stages = ranks > 1 ? Keys{"distributed.pipeline_parallel_size=2",
                                       "distributed.pipeline_schedule=zb_h1"}
                                : Keys{};
  const Keys recomputed{"policy.recompute.granularity=full"};
  for (const std::string name : {"tensorwise", "delayed", "blockwise", "mxfp8"}) {
    for (const Keys& keys : {strategy("ddp"), strategy("optim") + recomputed + tensor,
                             strategy("optim_grads") + stages, strategy("optim_grads_params")}) {
      CAPTURE(name, keys);
      const Group group{.shape = divisible};
      require_same(group.learn(recipe(name) + keys + rounded), group.learn(recipe(name) + keys + cached));
    }
    CAPTURE(name);
    const Group group{.shape = experts};
    const Keys keys = recipe(name) + exchange + strategy("optim");
    require_same(group.learn(keys + rounded), group.learn(keys + cached));
  }
  if (ranks > 2) return;
  for (const std::string& shape : {small, few_experts}) {
    const Group group{.device = "cuda", .shape = shape};
    const Keys keys = recipe("tensorwise") + Keys{"kernels.share_device=true"};
    require_same(group.learn(keys + rounded, 2), group.learn(keys + cached, 2));
  }
}

TEST_CASE("parameters in shards are not cached in FP8", "[engine][fp8]") {
  if (test_world().size() == 1) return;
  for (const std::string name : {"tensorwise", "mxfp8"}) {
    CAPTURE(name);
    const Keys bf16 = recipe(name) + Keys{"policy.precision=bfloat16"},
               sharded = strategy("optim_grads_params");
    CHECK(planned_bytes(bf16 + sharded) == planned_bytes(bf16 + sharded + rounded));
    CHECK(planned_bytes(bf16 + strategy("optim")) == planned_bytes(bf16 + strategy("optim") + cached));
    // Two copies of 2 layers of 4 + 3 * 4 matrices of 256 x 256.
    const int64_t copies = 2 * 2 * 16 * 256 * 256;
    const auto [weights, total] = planned_bytes(bf16 + sharded);
    const auto [weights_before, total_before] = planned_bytes(bf16 + sharded + cached);
    CHECK(weights_before - weights >= copies);
    CHECK(total_before - total > copies / 2);  // those of a GEMM remain
    // Nor where GEMMs are computed again.
    const Keys again{"policy.recompute.granularity=selective", "policy.recompute.modules=[mlp]"};
    CHECK(planned_bytes(bf16 + sharded + cached + again).second -
              planned_bytes(bf16 + sharded + again).second >
          copies / 2);
  }
}

TEST_CASE("a checkpoint of weights in FP8 resumes bit by bit, with and without", "[engine][fp8]") {
  comm::World& world = test_world();
  const SharedDirectory shared(world.comm());
  const Group group;
  int number = 0;
  for (const std::string& name : recipes)
    for (const std::string precision : {"float32", "bfloat16"})
      for (const bool saved : {true, false}) {
        CAPTURE(name, precision, saved);
        const Keys keys = recipe(name) + strategy("optim") + Keys{"policy.precision=" + precision};
        Trainee first = group.trainee(saved ? keys + kept : keys);
        first.train_step();
        first.train_step();
        train::SaveOptions options;
        options.store = fmt::format("{}/{}", shared.path, number++);
        options.resolved_config = "a: b\n";
        options.run = JsonValue::object({});
        const std::string path =
            train::save_checkpoint(train::state_of(first.engine(), nullptr),
                                   {.step = 2, .updates = 2, .consumed_samples = 16, .tokens = 256}, options,
                                   train::rank_group(world.comm()));
        REQUIRE(validate_checkpoint(path, Validation::full).empty());
        const Learned want = first.learn(2);
        for (const bool resumed : {true, false}) {
          CAPTURE(resumed);
          Trainee next = group.trainee((resumed ? keys + kept : keys));
          next.train_step();  // of other weights
          CheckpointReader reader(path);
          train::load_checkpoint(reader, train::state_of(next.engine(), nullptr));
          next.engine().restore({.updates = 2});
          next.skip_steps(1);
          require_same(next.learn(2), want);
        }
        world.comm().barrier();
      }
}
