// Activations that are moved to the host between the passes: the same bits in every layout, and on simulated
// GPUs, whose copies run as late as events allow.
#include "tests/engine/layouts.h"

using namespace nrl;
using namespace nrl::test;

namespace {

using Keys = std::vector<std::string>;

Keys operator+(Keys a, const Keys& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// The model with four layers.
std::string deeper(std::string model) {
  const std::string two = "layers: 2";
  const size_t at = model.find(model.find(two) == std::string::npos ? "n_layer: 2" : two);
  return model.replace(model.find('2', at), 1, "4");
}

const std::string gpt2 = deeper(small_gpt2), llama = deeper(small_llama), moe = deeper(small_qwen2_moe);
const Keys offload{"policy.offload_activations=true"};

Learned learned(const std::string& device, const std::string& model, const Keys& keys, bool offloads) {
  Trainee trainee(test_world().comm(), device, tiny_config(device, keys, model));
  auto host = static_cast<double>(trainee.engine().plan().memory.bytes(memory::Tier::host));
  trainee.groups().host(parallel::group::all).all_reduce(std::span(&host, 1));
  CHECK((host > 0) == offloads);
  return trainee.learn(3);
}

void check(const std::string& device, const std::string& model, const Keys& keys, const Keys& offloading) {
  CAPTURE(device, model, keys, offloading);
  const Keys all = Keys{"policy.train_global_batch_size=8", "policy.train_micro_batch_size=1"} + keys;
  const Learned want = learned(device, model, all, false);
  const Learned got = learned(device, model, all + offloading, true);
  REQUIRE(got.numbers == want.numbers);
  REQUIRE(got.elements == want.elements);
}

}  // namespace

TEST_CASE("offloading changes no bit on one rank", "[engine][offload]") {
  if (test_world().size() > 1) return;
  for (const std::string device : {"cpu", "cuda"})
    for (const std::string& model : {gpt2, moe}) {
      const Keys keep{"policy.recompute.granularity=none"};
      check(device, model, keep, offload);
      check(device, model, keep, {"policy.offload_activations=0.5"});
      check(device, model, {"policy.recompute.modules=[norm,activation]"},
            offload + Keys{"policy.offload_modules=[input,qkv,core_attn]"});
      check(device, model, {"policy.gradient_checkpointing=true"}, offload);
      check(device, model, {"policy.checkpoint_every=3"}, offload + Keys{"policy.offload_modules=[input]"});
    }
}

TEST_CASE("offloading works in a CUDA graph", "[engine][offload]") {
  if (test_world().size() > 1) return;
  check("cuda", llama, {"policy.cuda_graph=true"}, offload);
}

TEST_CASE("the copies of offloaded activations are timed, but not in a graph", "[engine][offload]") {
  if (test_world().size() > 1) return;
  for (const std::string device : {"cpu", "cuda", "graph"}) {
    CAPTURE(device);
    const bool graph = device == "graph";
    const std::string on = graph ? "cuda" : device;
    Trainee trainee(test_world().comm(), on,
                    tiny_config(on, offload + Keys{fmt::format("policy.cuda_graph={}", graph)}, llama));
    int64_t bytes = 0;
    for (int step = 0; step < 4; ++step) {
      const memory::HostCopyStatistics copies = trainee.train_step().copies;
      CHECK(copies.to_host.bytes > 0);
      CHECK(copies.from_host.bytes == copies.to_host.bytes);
      CHECK((step == 0 || copies.bytes() == bytes));
      bytes = copies.bytes();
      const bool timed = !graph || step < 2;  // the first steps are no graphs
      CHECK((copies.to_host.seconds > 0) == timed);
      CHECK((copies.from_host.seconds > 0) == timed);
      if (on == "cpu") CHECK(copies.exposed_seconds == Approx(copies.seconds()));
    }
  }
}

TEST_CASE("offloading of FP8 operands changes no bit", "[engine][offload]") {
  if (test_world().size() > 1) return;
  // Wide and long enough for the blocks of all recipes.
  const std::string wide =
      "{model_type: llama, vocab_size: 61, hidden_size: 128, intermediate_size: 256, num_hidden_layers: 4, "
      "num_attention_heads: 4, num_key_value_heads: 4, head_dim: 64, max_position_embeddings: 128, "
      "initializer_range: 0.1}";
  for (const std::string recipe : {"tensorwise", "delayed", "blockwise"})
    check("cpu", wide,
          {"policy.fp8_cfg.enabled=true", "policy.fp8_cfg.fp8_recipe=" + recipe,
           "policy.max_total_sequence_length=128", "policy.recompute.granularity=none"},
          offload);
}

TEST_CASE("offloading changes no bit on pipeline stages", "[engine][offload]") {
  const int n = test_world().size();
  if (n == 1) return;
  const Keys stages{fmt::format("distributed.pipeline_parallel_size={}", n)};
  for (const std::string device : {"cpu", "cuda"}) {
    if (device == "cuda" && n > 2) continue;
    for (const Keys& schedule :
         {Keys{"distributed.pipeline_schedule=1f1b"}, Keys{"distributed.pipeline_schedule=zb_h1"},
          Keys{"distributed.pipeline_schedule=interleaved", "distributed.virtual_pipeline_size=2"}}) {
      if (n > 2 && schedule.size() > 1) continue;  // four layers
      check(device, gpt2, stages + schedule, offload);
      check(device, llama, stages + schedule + Keys{"policy.checkpoint_ratio=0.5"},
            {"policy.offload_activations=0.5"});
    }
  }
}

TEST_CASE("offloading changes no bit on tensor-parallel and context-parallel ranks", "[engine][offload]") {
  const int n = test_world().size();
  if (n == 1) return;
  for (const std::string device : {"cpu", "cuda"}) {
    if (device == "cuda" && n > 2) continue;
    for (const bool sequence : {false, true}) {
      const Keys tensor{fmt::format("distributed.tensor_parallel_size={}", n),
                        fmt::format("distributed.sequence_parallel={}", sequence)};
      check(device, llama, tensor, offload);
      check(device, moe, tensor, offload);
      if (sequence) check(device, gpt2, tensor + Keys{"policy.recompute.modules=[norm,gather]"}, offload);
    }
    check(device, llama, {fmt::format("distributed.context_parallel_size={}", n)}, offload);
  }
}

TEST_CASE("offloading changes no bit with sharded parameters and experts", "[engine][offload]") {
  const int n = test_world().size();
  if (n == 1) return;
  check("cpu", gpt2,
        {"distributed.shard_strategy=optim_grads_params", "distributed.bucket_size_mb=0.001",
         "distributed.overlap_param_gather=true"},
        offload);
  check("cpu", moe, {fmt::format("distributed.expert_parallel_size={}", n)}, offload);
}
