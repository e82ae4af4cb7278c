// Matrices, vocabulary, sequence and experts divided over ranks: bits and bytes, and a GPU's kernels and
// communication. tests/layouts compares all layouts with one rank. Tolerances are those of fp32 sums in
// another order, 1e-5 of a loss or norm and 1e-4 of a tensor's root mean square.
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

TEST_CASE("the GPU's kernels and communication learn the same", "[engine][tensor][device]") {
  if (test_world().size() > 2) return;  // kernels on fibers are slow
  const std::vector<std::string> f32{"policy.precision=float32"};
  require_same_learning("cuda", small_gpt2, f32, tensor_parallel(2, true), 1e-5, 2);
  require_same_learning("cuda", small_llama, f32, tensor_parallel(2, false), 1e-5, 2);
  require_same_learning("cuda", small_qwen3, {"policy.precision=bfloat16"}, tensor_parallel(2, true), 2e-2,
                        2);
  require_same_learning("cuda", small_gemma3, f32, tensor_parallel(2, true), 1e-5, 2);
  require_same_learning("cuda", small_qwen2_moe, f32, tensor_parallel(2, true), 1e-5, 2);
  for (const auto& [sequence, overlap] : overlaps())
    require_same_learning("cuda", small_gpt2, f32, tensor_parallel(2, sequence) + overlap, 1e-5, 1);
  for (const std::string axis : {"expert_parallel_size=2", "expert_tensor_parallel_size=2"})
    for (const std::string dispatch :
         {"moe_token_dispatcher_type=alltoall", "moe_token_dispatcher_type=allgather", "moe_row_slack=0.3"}) {
      if (dispatch == "moe_row_slack=0.3" && axis.find("tensor") != std::string::npos) continue;
      require_same_learning("cuda", small_qwen2_moe, f32, {"distributed." + axis, "policy.model." + dispatch},
                            1e-5, 2);
    }
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
