// Whether a library or our own kernels run an attention problem, and how that is noted.

#include <vector>

#include "core/ops/kernel_table.h"
#include "core/ops/libraries.h"
#include "tests/attention/problem.h"
#include "tests/catch.h"

namespace nrl::ops::attention {
namespace {

struct FakeEngine final : Engine {
  std::string name() const override { return "a library"; }
  const std::string& no_plan_reason(const Problem& p, size_t workspace) override {
    return workspace < 1000 || p.window > 0 ? reason_ : none_;
  }
  void forward(Exec&, const AttentionForward&) override {}
  void backward(Exec&, const AttentionBackward&) override {}
  std::string not_capturable_reason(const Problem& p) const override {
    return p.query.rows % 2 == 1 ? "odd" : "";
  }
  std::string reason_ = "a reason", none_;
};

Problem small_problem() {
  return training_problem(Direction::forward, 128, 2, {64, true}, 4, 2, 64);
}
std::string text_of(const Libraries& libraries, const Problem& p, size_t workspace) {
  return describe(choose(libraries, p, workspace), p).implementation;
}

TEST_CASE("A library runs what both our rules and its own support") {
  Libraries libraries;
  Problem p = small_problem();
  CHECK(choose(libraries, p, 1000).engine == nullptr);
  libraries.attention = std::make_shared<FakeEngine>();
  CHECK(choose(libraries, p, 1000).engine == libraries.attention.get());
  CHECK(choose(libraries, p, 10).engine == nullptr);
  CHECK(text_of(libraries, p, 1000) == "a library");
  CHECK(text_of(libraries, p, 10) == "our own kernels (a reason)");
  p.d = 36;
  CHECK(choose(libraries, p, 1000).reason == "a head dimension of 36, not a multiple of 8");
}

TEST_CASE("Attention dropout runs on our own kernels, evaluation of the same model need not") {
  Libraries libraries;
  libraries.attention = std::make_shared<FakeEngine>();
  for (const Direction direction : {Direction::forward, Direction::backward}) {
    Problem training = training_problem(direction, 128, 2, {64, true}, 4, 2, 64);
    training.dropout = true;
    CHECK(choose(libraries, training, 1000).engine == nullptr);
    CHECK(text_of(libraries, training, 1000).find("our own kernels (attention dropout") == 0);
  }
  std::vector<float> memory(4096);
  std::vector<int32_t> cu{0, 4};
  AttentionForward a;
  a.q = a.k = a.v = a.out = make_tensor(memory.data(), DType::bf16, {4, 1, 64});
  a.cu_q = a.cu_k = make_tensor(cu.data(), DType::i32, {2});
  a.lengths = {4, true};
  a.dropout.p = 0.1f;
  CHECK(choose(libraries, problem_of(a), 1000).engine == nullptr);
  a.dropout.p = 0;
  CHECK(choose(libraries, problem_of(a), 1000).engine == libraries.attention.get());
}

TEST_CASE("The choice names its reason") {
  Problem p = small_problem();
  p.dtype = DType::f32;
  CHECK(unsupported_reason(p) == "f32 tensors");
  Libraries none;
  none.why_no_attention = "cuDNN cannot be loaded";
  CHECK(text_of(none, p, 0) == "our own kernels (cuDNN cannot be loaded)");
  for (const DType dtype : {DType::f16, DType::bf16}) {
    p.dtype = dtype;
    CHECK(unsupported_reason(p).empty());
  }
  p.equal = p.self = false;
  CHECK(unsupported_reason(p) == "sequences of different lengths with other keys than queries");
  p.equal = p.self = true;
  p.aligned = false;
  CHECK_FALSE(unsupported_reason(p).empty());
  p.aligned = true;
  p.query.rows = 1;
  CHECK_FALSE(unsupported_reason(p).empty());
}

TEST_CASE("A library runs the queries of a rank with the keys of others") {
  Libraries libraries;
  libraries.attention = std::make_shared<FakeEngine>();
  for (const Direction direction : {Direction::forward, Direction::backward})
    for (const int64_t samples : {1, 3})
      for (const bool earlier : {true, false}) {
        Problem p = ring_problem(direction, samples, 64, earlier, 4, 2, 64);
        CHECK(unsupported_reason(p).empty());
        CHECK(choose(libraries, p, 1000).engine == libraries.attention.get());
        CHECK(describe(choose(libraries, p, 1000), p).pass ==
              (direction == Direction::forward ? "forward to other keys" : "backward to other keys"));
        p.equal = false;  // documents within a sample
        CHECK_FALSE(unsupported_reason(p).empty());
      }
  Problem p = gather_problem(Direction::forward, 64, 128, 4, 2, 64);
  CHECK(unsupported_reason(p).empty());
  std::swap(p.query, p.key);
  CHECK(unsupported_reason(p) == "queries that see no key");
  p = gather_problem(Direction::forward, 1, 128, 4, 2, 64);
  CHECK_FALSE(unsupported_reason(p).empty());
}

TEST_CASE("A problem has the blocks of rows that the host knows") {
  std::vector<float> memory(1 << 16);
  std::vector<int32_t> cu(4);
  AttentionForward a;
  a.q = a.out = make_tensor(memory.data(), DType::bf16, {24, 1, 64});
  a.k = a.v = make_tensor(memory.data(), DType::bf16, {48, 1, 64});
  a.cu_q = make_tensor(cu.data(), DType::i32, {4});
  a.cu_k = make_tensor(cu.data() + 1, DType::i32, {4});
  a.lengths = {.longest = 16};
  CHECK_FALSE(problem_of(a).equal);
  CHECK_FALSE(problem_of(a).self);
  CHECK(problem_of(a).sequences == 3);
  a.lengths.blocks = 2;
  a.lengths.queries = {.first = 4, .rows = 8, .step = 12};
  a.lengths.keys = {.first = 0, .rows = 16, .step = 24};
  const Problem p = problem_of(a);
  CHECK(p.equal);
  CHECK_FALSE(p.self);
  CHECK(p.sequences == 2);
  CHECK(p.query == a.lengths.queries);
  CHECK(p.key == a.lengths.keys);
  CHECK(p.queries == 24);
  CHECK(p.keys == 48);
}

TEST_CASE("FP8 operands run on a library or not at all") {
  Problem p = small_problem();
  p.dtype = DType::e4m3;
  CHECK(unsupported_reason(p).empty());
  const auto refused = [&](const auto& change) {
    Problem other = p;
    change(other);
    return !unsupported_reason(other).empty();
  };
  CHECK(refused([](Problem& o) { o.result = DType::f32; }));
  CHECK(refused([](Problem& o) { o.equal = false; }));
  CHECK(refused([](Problem& o) { o.self = false; }));
  CHECK(refused([](Problem& o) { o.d = 72; }));
  CHECK(refused([](Problem& o) { o.d = 144; }));
  CHECK(refused([](Problem& o) { o.dropout = true; }));
  CHECK(refused([](Problem& o) { o.aligned = false; }));
  for (const int major : {8, 9, 12}) CHECK_FALSE(fp8_attention_refusal(major, DType::bf16, 64).empty());
  Libraries libraries;
  libraries.attention = std::make_shared<FakeEngine>();
  KernelSet needed;
  Exec exec;
  exec.libraries = &libraries;
  exec.workspace.size = 1000;
  exec.needed = &needed;
  foresee(exec, p);
  CHECK(libraries.choices.size() == 1);
  p.window = 7;
  try {
    foresee(exec, p);
    FAIL("not refused");
  } catch (const Error& error) {
    CHECK(error.code() == Exit::config);
    CHECK(std::string(error.what()).find("does not run the forward pass: a reason") != std::string::npos);
  }
}

TEST_CASE("A dry run notes each choice once, and what cannot be captured") {
  Libraries libraries;
  libraries.attention = std::make_shared<FakeEngine>();
  KernelSet needed;
  Exec exec;
  exec.libraries = &libraries;
  exec.workspace.size = 1000;
  exec.needed = &needed;
  Problem p = small_problem();
  foresee(exec, p);
  foresee(exec, p);
  CHECK(libraries.choices == std::vector<LibraryChoice>{{"attention", "forward", "a library"}});
  CHECK(libraries.not_capturable.empty());
  p.window = 7;
  p.query.rows = p.key.rows = 65;
  foresee(exec, p);  // on our own kernels, which can be captured
  CHECK(libraries.choices.back() == LibraryChoice{"attention", "forward", "our own kernels (a reason)"});
  CHECK(libraries.not_capturable.empty());
  p.window = 0;
  foresee(exec, p);
  CHECK(libraries.choices.size() == 2);
  CHECK(libraries.not_capturable == "odd");
  exec.libraries = nullptr;
  foresee(exec, p);  // a CPU has no libraries
}

}  // namespace
}  // namespace nrl::ops::attention
