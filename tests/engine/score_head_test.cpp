// A scalar head on ranks that divide the model and its tokens: the numbers of one rank.
#include "tests/catch.h"
#include "tests/engine/layouts.h"

using namespace nrl;
using namespace nrl::test;

namespace {

/// `model` with a scalar head.
std::string reward(std::string model) {
  return model.insert(1, "architectures: [AForSequenceClassification], num_labels: 1, ");
}

/// Layouts of all ranks.
std::vector<std::vector<std::string>> layouts() {
  const int n = test_world().size();
  const auto size = [](const char* axis, int ranks) {
    return fmt::format("distributed.{}_parallel_size={}", axis, ranks);
  };
  std::vector<std::vector<std::string>> out{{size("tensor", n), "distributed.sequence_parallel=false"},
                                            {size("tensor", n), "distributed.sequence_parallel=true"},
                                            {size("context", 2)},
                                            {size("pipeline", 2)},
                                            {"distributed.shard_strategy=optim_grads_params"}};
  if (n == 4) {
    out.push_back({size("tensor", 2), size("context", 2), "distributed.sequence_parallel=true"});
    out.push_back({size("tensor", 2), size("pipeline", 2), "distributed.sequence_parallel=true"});
    out.push_back({size("context", 2), size("pipeline", 2)});
  }
  return out;
}

}  // namespace

TEST_CASE("a scalar head learns the same on every layout", "[engine][reward]") {
  for (const std::vector<std::string>& layout : layouts())
    for (const std::string& model : {small_gpt2, small_llama, small_qwen3})
      require_same_learning("cpu", reward(model), {"policy.precision=float32"}, layout, 1e-5, 2);
}

TEST_CASE("a scalar head beside adapters learns the same on every layout", "[engine][reward][lora]") {
  for (const std::vector<std::string>& layout : layouts())
    require_same_learning("cpu", reward(small_llama),
                          {"policy.precision=float32", "policy.lora.enabled=true", "policy.lora.dim=4"},
                          layout, 1e-5, 2);
}

TEST_CASE("the GPU's kernels and communication learn the same scores", "[engine][reward][device]") {
  if (test_world().size() > 2) return;  // kernels on fibers are slow
  for (const char* sequence : {"true", "false"})
    require_same_learning(
        "cuda", reward(small_llama), {"policy.precision=float32"},
        {"distributed.tensor_parallel_size=2", fmt::format("distributed.sequence_parallel={}", sequence)},
        1e-5, 2);
  require_same_learning("cuda", reward(small_qwen3), {"policy.precision=bfloat16"},
                        {"distributed.tensor_parallel_size=2"}, 2e-2, 2);
}
