// Experts divided over ranks: losses, gradient norms, gradients and weights of one rank. Tolerances are those
// of fp32 sums in another order, 1e-5 of a loss or norm and 1e-4 of a tensor's root mean square after three
// steps.
#include "tests/catch.h"
#include "tests/engine/layouts.h"

using namespace nrl;
using namespace nrl::test;

namespace {

using Keys = std::vector<std::string>;

Keys operator+(Keys a, const Keys& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

const Keys in_rounds{"policy.model.moe_row_slack=0.3"};  ///< memory for less than a third of the rows
const Keys dispatchers[] = {{"policy.model.moe_token_dispatcher_type=alltoall"},
                            {"policy.model.moe_token_dispatcher_type=allgather"}};

/// Ranks that split the experts, and each of them.
Keys experts(int ep, int etp) {
  return {fmt::format("distributed.expert_parallel_size={}", ep),
          fmt::format("distributed.expert_tensor_parallel_size={}", etp)};
}

/// Without a shared expert, and with as many experts for few tokens as leave some ranks without any.
const std::string small_qwen3_moe =
    "{model_type: qwen3_moe, vocab_size: 61, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 4, head_dim: 8, max_position_embeddings: 64, "
    "initializer_range: 0.2, num_experts: 8, num_experts_per_tok: 1, moe_intermediate_size: 8}";

}  // namespace

TEST_CASE("expert-parallel ranks learn what one rank learns", "[engine][experts]") {
  const int ranks = test_world().size();
  for (const Keys& dispatcher : dispatchers)
    for (int ep = 1; ep <= ranks; ep *= 2)
      for (const std::string recompute : {"recompute.modules=[]", "recompute.modules=[norm]",
                                          "recompute.modules=[norm, activation, moe]", "checkpoint_every=2"})
        require_same_learning("cpu", small_qwen2_moe, {"policy." + recompute},
                              experts(ep, ranks / ep) + dispatcher, 1e-5);
}

TEST_CASE("experts over the ranks of other axes", "[engine][experts]") {
  const int ranks = test_world().size();
  const std::string all = std::to_string(ranks);
  for (const Keys& dispatcher : dispatchers) {
    for (const Keys& grid : {experts(ranks, 1), experts(1, ranks)}) {
      const Keys layout = grid + dispatcher;
      require_same_learning("cpu", small_qwen2_moe, {},
                            layout + Keys{"distributed.tensor_parallel_size=" + all}, 1e-5);
      require_same_learning("cpu", small_qwen2_moe, {"policy.max_total_sequence_length=16"},
                            layout + Keys{"distributed.context_parallel_size=" + all}, 1e-5);
    }
    if (ranks < 4) continue;
    for (const std::string strategy : {"ddp", "optim", "optim_grads", "optim_grads_params"})
      for (const std::string axis : {"tensor", "context", "pipeline"})
        require_same_learning(
            "cpu", small_qwen2_moe, {},
            experts(2, 1) + dispatcher +
                Keys{"distributed." + axis + "_parallel_size=2", "distributed.shard_strategy=" + strategy,
                     "distributed.bucket_size_mb=0.001"},
            1e-5);
  }
}

// Two tokens on each rank: some ranks receive nothing, others more than they send.
TEST_CASE("ranks whose experts nobody chooses", "[engine][experts]") {
  const int ranks = test_world().size();
  for (const Keys& dispatcher : dispatchers)
    require_same_learning("cpu", small_qwen3_moe,
                          {"policy.max_total_sequence_length=2", "policy.train_micro_batch_size=1"},
                          experts(ranks, 1) + dispatcher, 1e-5);
}

TEST_CASE("experts with a capacity take the same tokens on several ranks", "[engine][experts]") {
  const int ranks = test_world().size();
  for (const std::string pad : {"false", "true"})
    for (const Keys& grid : {experts(ranks, 1), experts(ranks / 2, 2)})
      require_same_learning(
          "cpu", small_qwen2_moe,
          {"policy.model.moe_expert_capacity_factor=0.8",
           "policy.model.moe_pad_expert_input_to_capacity=" + pad, "policy.train_micro_batch_size=1"},
          grid, 1e-5);
}

// The rows of a round have the bits that they have otherwise; weight gradients are added by rounds.
TEST_CASE("rows that there is no memory for are exchanged in rounds", "[engine][experts]") {
  const int ranks = test_world().size();
  for (int etp = 1; etp < ranks; etp *= 2)
    for (const std::string recompute :
         {"recompute.modules=[]", "recompute.modules=[norm]", "recompute.modules=[norm, activation, moe]",
          "recompute.granularity=full", "checkpoint_every=2"})
      require_same_learning("cpu", small_qwen2_moe, {"policy." + recompute},
                            experts(ranks / etp, etp) + in_rounds, 1e-5);
  require_same_learning("cpu", small_qwen2_moe, {},
                        experts(ranks, 1) + Keys{"policy.model.moe_row_slack=0.1"}, 1e-5);
  require_same_learning("cpu", small_qwen2_moe,
                        {"policy.model.moe_expert_capacity_factor=0.8", "policy.train_micro_batch_size=1"},
                        experts(ranks, 1) + in_rounds, 1e-5);
  for (const std::string strategy : {"optim_grads", "optim_grads_params"})
    require_same_learning(
        "cpu", small_qwen2_moe, {},
        experts(ranks, 1) + in_rounds +
            Keys{"distributed.shard_strategy=" + strategy, "distributed.bucket_size_mb=0.001"},
        1e-5);
  if (ranks < 4) return;
  for (const std::string chunks : {"1", "2"})
    require_same_learning(
        "cpu", small_qwen2_moe, {},
        experts(2, 1) + in_rounds +
            Keys{"distributed.pipeline_parallel_size=2", "distributed.virtual_pipeline_size=" + chunks},
        1e-5);
}

TEST_CASE("the router's losses do not depend on where experts are", "[engine][experts]") {
  for (const Keys& dispatcher : dispatchers)
    require_same_learning("cpu", small_qwen2_moe,
                          {"policy.model.moe_aux_loss_coeff=0.1", "policy.model.moe_z_loss_coeff=0.01"},
                          experts(test_world().size(), 1) + dispatcher, 1e-5);
}

TEST_CASE("the GPU's kernels and communication send tokens to the same experts", "[engine][experts][sim]") {
  if (test_world().size() != 2) return;
  const Keys f32{"policy.precision=float32"};
  for (const Keys& dispatcher : dispatchers) {
    require_same_learning("cuda", small_qwen2_moe, f32, experts(2, 1) + dispatcher, 1e-5, 2);
    require_same_learning("cuda", small_qwen2_moe, f32, experts(1, 2) + dispatcher, 1e-5, 2);
  }
  require_same_learning("cuda", small_qwen2_moe, f32, experts(2, 1) + in_rounds, 1e-5, 2);
}
