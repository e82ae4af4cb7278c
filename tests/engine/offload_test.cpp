// Activations that are moved to the host between the passes, on simulated GPUs, whose copies run as late as
// events allow: the same bits. tests/layouts does this on CPUs, in every layout.
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

TEST_CASE("offloading changes no bit on a GPU", "[engine][offload]") {
  if (test_world().size() > 1) return;
  const Keys keep{"policy.recompute.granularity=none"};
  check("cuda", gpt2, keep, {"policy.offload_activations=0.5"});
  check("cuda", moe, keep, offload);
  check("cuda", gpt2, {"policy.recompute.modules=[norm,activation]"},
        offload + Keys{"policy.offload_modules=[input,qkv,core_attn]"});
  check("cuda", moe, {"policy.checkpoint_every=3"}, offload + Keys{"policy.offload_modules=[input]"});
}

TEST_CASE("offloading changes no bit on two GPUs", "[engine][offload]") {
  if (test_world().size() != 2) return;
  check("cuda", gpt2, {"distributed.pipeline_parallel_size=2", "distributed.virtual_pipeline_size=2"},
        offload);
  check("cuda", moe, {"distributed.tensor_parallel_size=2"}, offload);
  check("cuda", llama, {"distributed.context_parallel_size=2"}, offload);
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
