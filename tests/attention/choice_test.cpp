// Who does an attention problem, a library or our own kernels, and the text that says so.

#include <vector>

#include "core/ops/attention_engine.h"
#include "tests/catch.h"

namespace nrl::ops::attention {
namespace {

struct Refuser final : Engine {
  std::string name() const override { return "a library"; }
  const std::string& refusal(const Problem& p, size_t workspace) override {
    return workspace < 1000 ? why_not_ : p.window > 0 ? why_not_ : none_;
  }
  void forward(Exec&, const AttentionForward&) override {}
  void backward(Exec&, const AttentionBackward&) override {}
  std::string why_not_ = "a reason", none_;
};

TEST_CASE("A library gets what neither our rules nor it refuse") {
  Refuser engine;
  Problem p = training_problem(Direction::forward, DType::bf16, 128, 2, {64, true}, 4, 2, 64);
  CHECK(choose(nullptr, p, 1000) == nullptr);
  CHECK(choose(&engine, p, 1000) == &engine);
  CHECK(choose(&engine, p, 10) == nullptr);
  CHECK(describe_choice(&engine, "", p, 1000) == "attention forward: a library");
  CHECK(describe_choice(&engine, "", p, 10) == "attention forward: our own kernels (a reason)");
  p.d = 36;
  CHECK(choose(&engine, p, 1000) == nullptr);
}

TEST_CASE("Attention dropout runs on our own kernels, evaluation of the same model need not") {
  Refuser engine;
  for (const Direction direction : {Direction::forward, Direction::backward}) {
    const Problem training =
        training_problem(direction, DType::bf16, 128, 2, {64, true}, 4, 2, 64, true, 0, true);
    CHECK(choose(&engine, training, 1000) == nullptr);
    CHECK(describe_choice(&engine, "", training, 1000).find("our own kernels (attention dropout") !=
          std::string::npos);
  }
  std::vector<float> memory(4096);
  std::vector<int32_t> cu{0, 4};
  AttentionForward a;
  a.q = a.k = a.v = a.out = make_tensor(memory.data(), DType::bf16, {4, 1, 64});
  a.cu_q = a.cu_k = make_tensor(cu.data(), DType::i32, {2});
  a.lengths = {4, true};
  a.dropout.p = 0.1f;
  CHECK(choose(&engine, problem_of(a), 1000) == nullptr);
  a.dropout.p = 0;
  CHECK(choose(&engine, problem_of(a), 1000) == &engine);
}

TEST_CASE("The choice names its reason") {
  Problem p = training_problem(Direction::forward, DType::bf16, 128, 2, {64, true}, 4, 2, 64);
  p.dtype = DType::f32;
  CHECK(refusal(p) == "f32 tensors");
  CHECK(describe_choice(nullptr, "cuDNN cannot be loaded", p, 0) ==
        "attention forward: our own kernels (cuDNN cannot be loaded)");
  p.dtype = DType::bf16;
  CHECK(refusal(p).empty());
  p.self = false;
  CHECK_FALSE(refusal(p).empty());
  p.self = true;
  p.aligned = false;
  CHECK_FALSE(refusal(p).empty());
  p.aligned = true;
  p.longest = 1;
  CHECK_FALSE(refusal(p).empty());
}

}  // namespace
}  // namespace nrl::ops::attention
