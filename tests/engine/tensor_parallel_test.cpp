// Matrices, vocabulary and sequence divided over tensor-parallel ranks: losses, gradient norms, gradients and
// weights of one rank. Tolerances are those of fp32 sums in another order, 1e-5 of a loss or norm and 1e-4 of
// a tensor's root mean square after three steps.
#include "core/device/cpu/features.h"
#include "tests/catch.h"
#include "tests/engine/layouts.h"

using namespace nrl;
using namespace nrl::test;

namespace {

std::vector<std::string> tensor_parallel(int ranks, bool sequence) {
  return {fmt::format("distributed.tensor_parallel_size={}", ranks),
          fmt::format("distributed.sequence_parallel={}", sequence)};
}

std::vector<std::string> operator+(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// Sequence parallelism, and the keys of every way to overlap communication that it allows. Three pieces of a
/// rank's rows are unequal, and of more than it has some ranks have one row each.
std::vector<std::pair<bool, std::vector<std::string>>> overlaps() {
  const auto keys = [](const std::string& method, const std::string& splits = "null") {
    return std::vector<std::string>{"distributed.tp_comm_overlap=" + method,
                                    "distributed.tp_comm_overlap_splits=" + splits};
  };
  return {{true, keys("bulk")}, {true, keys("pipelined", "3")}, {true, keys("pipelined", "100")},
          {true, keys("ring")}, {false, keys("bulk")},          {false, keys("pipelined", "3")}};
}

}  // namespace

TEST_CASE("tensor-parallel ranks learn what one rank learns", "[engine][tensor]") {
  const int ranks = test_world().size();
  for (const bool sequence : {false, true})
    for (const std::string& model : {small_gpt2, small_llama, small_qwen3})
      for (const std::string recompute :
           {"recompute.granularity=none", "recompute.granularity=selective", "checkpoint_every=2"})
        require_same_learning("cpu", model, {"policy." + recompute}, tensor_parallel(ranks, sequence), 1e-5);
}

TEST_CASE("tensor-parallel ranks with tokens of their own share experts", "[engine][tensor][experts]") {
  const int ranks = test_world().size();
  for (const std::string recompute : {"[norm]", "[norm, activation, moe]"})
    require_same_learning("cpu", small_qwen2_moe,
                          {"policy.recompute.granularity=selective", "policy.recompute.modules=" + recompute},
                          tensor_parallel(ranks, true), 1e-5);
  for (const std::string balance : {"aux_loss", "seq_aux_loss", "global_aux_loss"})
    for (const std::string router :
         {"",
          ", moe_router_score_function: sigmoid, moe_router_enable_expert_bias: true, "
          "moe_router_num_groups: 2, moe_router_group_topk: 1, moe_router_topk_scaling_factor: 1.5"}) {
      std::string model = small_qwen2_moe;
      model.insert(model.size() - 1,
                   ", moe_aux_loss_coeff: 0.3, moe_z_loss_coeff: 0.1, "
                   "moe_router_load_balancing_type: " +
                       balance + router);
      require_same_learning("cpu", model, {}, tensor_parallel(ranks, true), 1e-5);
      if (ranks >= 4)
        require_same_learning(
            "cpu", model, {},
            tensor_parallel(2, true) + std::vector<std::string>{"distributed.context_parallel_size=2"}, 1e-5);
    }
  if (ranks < 4) return;
  for (const std::string strategy : {"ddp", "optim", "optim_grads", "optim_grads_params"})
    for (const std::string other : {"data_parallel_size=auto", "context_parallel_size=2"})
      require_same_learning(
          "cpu", small_qwen2_moe, {},
          tensor_parallel(2, true) + std::vector<std::string>{"distributed.shard_strategy=" + strategy,
                                                              "distributed." + other,
                                                              "distributed.bucket_size_mb=0.001"},
          1e-5);
}

TEST_CASE("with every sharding strategy of data-parallel ranks", "[engine][tensor]") {
  const int ranks = test_world().size();
  if (ranks < 4) return;
  for (const bool sequence : {false, true})
    for (const std::string& model : {small_gpt2, small_qwen3})
      for (const std::string strategy : {"ddp", "optim", "optim_grads", "optim_grads_params"})
        for (const bool overlap : {false, true}) {
          if (overlap && strategy == "ddp") continue;
          require_same_learning(
              "cpu", model, {},
              tensor_parallel(ranks / 2, sequence) +
                  std::vector<std::string>{"distributed.shard_strategy=" + strategy,
                                           fmt::format("distributed.overlap_param_gather={}", overlap),
                                           "distributed.bucket_size_mb=0.001"},
              1e-5);
        }
}

TEST_CASE("with context parallelism", "[engine][tensor]") {
  if (test_world().size() < 4) return;
  for (const bool sequence : {false, true})
    for (const std::string& model : {small_llama, small_qwen3})
      require_same_learning(
          "cpu", model, {},
          tensor_parallel(2, sequence) + std::vector<std::string>{"distributed.context_parallel_size=2"},
          1e-5);
}

TEST_CASE("with communication beside GEMMs", "[engine][tensor]") {
  const int ranks = test_world().size();
  for (const auto& [sequence, overlap] : overlaps())
    for (const std::string& model : {small_gpt2, small_llama, small_qwen3}) {
      const std::vector<std::string> layout = tensor_parallel(ranks, sequence) + overlap;
      require_same_learning("cpu", model, {}, layout, 1e-5);
      if (sequence)
        require_same_learning(
            "cpu", model, {},
            layout + std::vector<std::string>{"policy.recompute.modules=[norm,activation,gather]"}, 1e-5);
      require_same_learning("cpu", model, {},
                            layout + std::vector<std::string>{"policy.gradient_checkpointing=true"}, 1e-5);
      if (ranks < 4) continue;
      const std::vector<std::string> half = tensor_parallel(2, sequence) + overlap;
      require_same_learning("cpu", model, {},
                            half + std::vector<std::string>{"distributed.pipeline_parallel_size=2",
                                                            "distributed.pipeline_schedule=zb_h1",
                                                            "policy.recompute.granularity=selective"},
                            1e-5);
      require_same_learning("cpu", model, {},
                            half + std::vector<std::string>{"distributed.shard_strategy=optim_grads_params",
                                                            "distributed.overlap_param_gather=true",
                                                            "distributed.bucket_size_mb=0.001"},
                            1e-5);
    }
}

// bf16 rounds the ranks' parts of a sum: 2^-9 of a value for each.
TEST_CASE("in bf16 the sums of tensor-parallel ranks are those of one rank rounded", "[engine][tensor]") {
  const std::vector<std::string> bf16{"policy.precision=bfloat16"};
  for (const bool sequence : {false, true})
    require_same_learning("cpu", small_qwen3, bf16, tensor_parallel(test_world().size(), sequence), 2e-2);
  for (const auto& [sequence, overlap] : overlaps())
    require_same_learning("cpu", small_qwen3, bf16, tensor_parallel(test_world().size(), sequence) + overlap,
                          2e-2);
}

TEST_CASE("the GPU's kernels and communication learn the same", "[engine][tensor][device]") {
  if (test_world().size() > 2) return;  // kernels on fibers are slow
  const std::vector<std::string> f32{"policy.precision=float32"};
  require_same_learning("cuda", small_gpt2, f32, tensor_parallel(2, true), 1e-5, 2);
  require_same_learning("cuda", small_llama, f32, tensor_parallel(2, false), 1e-5, 2);
  require_same_learning("cuda", small_qwen3, {"policy.precision=bfloat16"}, tensor_parallel(2, true), 2e-2,
                        2);
  require_same_learning("cuda", small_qwen2_moe, f32, tensor_parallel(2, true), 1e-5, 2);
  for (const auto& [sequence, overlap] : overlaps())
    require_same_learning("cuda", small_gpt2, f32, tensor_parallel(2, sequence) + overlap, 1e-5, 1);
}

namespace {

/// What `layout` on all ranks learns in some steps, and the bytes that its tensor-parallel groups sent.
struct Outcome {
  Learned learned;
  double sent = 0;
};
Outcome outcome_of(const std::vector<std::string>& layout) {
  CAPTURE(layout);
  comm::Communicator& world = test_world().comm();
  Trainee trainee(
      world, "cpu",
      tiny_config("cpu", std::vector<std::string>{"policy.train_global_batch_size=8"} + layout, small_qwen3));
  comm::CollectiveLog& log = *trainee.groups()[parallel::group::tp].collective_log();
  log.reset_totals();
  Outcome out{.learned = trainee.learn(2)};
  for (const comm::LogTotal& total : log.totals())
    if (total.group == "tp") out.sent += total.wire();
  return out;
}

void require_same_bits(const Learned& got, const Learned& want) {
  REQUIRE(got.numbers == want.numbers);
  REQUIRE(got.elements == want.elements);
}

void require_close(const Learned& got, const Learned& want) {
  std::string worst;
  const double difference = largest_difference(got.elements, want.elements, worst);
  CAPTURE(worst, difference);
  REQUIRE(difference <= 1e-4);
}

}  // namespace

// An all-reduce moves as much as an all-gather and a reduce-scatter of the same vector. Groups of some of the
// ranks only: that of all ranks has other traffic as well.
TEST_CASE("sequence parallelism communicates as much as tensor parallelism alone", "[engine][tensor]") {
  if (test_world().size() < 4) return;
  const double alone = outcome_of(tensor_parallel(2, false)).sent;
  REQUIRE(alone > 0);
  REQUIRE(outcome_of(tensor_parallel(2, true)).sent == alone);
}

TEST_CASE("inputs that are gathered again are the same bits and more bytes", "[engine][tensor]") {
  const std::vector<std::string> sequence = tensor_parallel(test_world().size(), true);
  const auto recomputing = [&](const std::string& modules) {
    return outcome_of(sequence + std::vector<std::string>{"policy.recompute.modules=" + modules});
  };
  const Outcome kept = recomputing("[]");
  for (const std::string modules : {"[gather]", "[norm,gather]", "[norm,activation,gather]"}) {
    CAPTURE(modules);
    const Outcome again = recomputing(modules);
    require_same_bits(again.learned, kept.learned);
    if (test_world().size() < 4) continue;
    constexpr int blocks = 2, hidden = 16, tokens = 2 * 8, microbatches = 4, steps = 2;
    const double gathers = 2.0 * blocks * microbatches * steps, others = test_world().size() - 1;
    REQUIRE(again.sent - kept.sent == gathers * tokens * hidden * 4 * others / (others + 1));
  }
}

TEST_CASE("communication beside GEMMs is the same bytes and, where the GEMMs are the same, the same bits",
          "[engine][tensor]") {
  // The group of all ranks has other traffic as well.
  const int tensor = test_world().size() < 4 ? test_world().size() : 2;
  for (const auto& [sequence, overlap] : overlaps()) {
    CAPTURE(sequence, overlap);
    const Outcome want = outcome_of(tensor_parallel(tensor, sequence)),
                  got = outcome_of(tensor_parallel(tensor, sequence) + overlap);
    REQUIRE(got.sent == want.sent);
    if (overlap.front().ends_with("bulk")) {
      require_same_bits(got.learned, want.learned);
      continue;
    }
    require_close(got.learned, want.learned);  // a GEMM of few rows adds in another order
  }
}

// The library that computes GEMMs without AVX-512 chooses the order of sums by the number of rows.
TEST_CASE("GEMMs on pieces of 32 rows and sums of two ranks are the same bits", "[engine][tensor]") {
  const std::vector<std::string> tokens{"policy.train_micro_batch_size=16",
                                        "policy.train_global_batch_size=32"};
  for (const bool sequence : {false, true}) {
    const Outcome want = outcome_of(tensor_parallel(2, sequence) + tokens);
    for (const std::string method : {"pipelined", "ring"}) {
      if (method == "ring" && !sequence) continue;
      CAPTURE(sequence, method);
      std::vector<std::string> layout = tensor_parallel(2, sequence) + tokens +
                                        std::vector<std::string>{"distributed.tp_comm_overlap=" + method};
      if (method == "pipelined") layout.emplace_back("distributed.tp_comm_overlap_splits=2");
      const Learned got = outcome_of(layout).learned;
      if (cpu::best_isa() >= cpu::Isa::avx512)
        require_same_bits(got, want.learned);
      else
        require_close(got, want.learned);
    }
  }
}
