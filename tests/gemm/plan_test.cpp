// The hardware's rules, each both ways, and the mapping to column-major matrices.

#include "core/ops/gemm/plan.h"

#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "core/ops/gemm/tune_cache.h"
#include "core/ops/linear/gpu.h"
#include "tests/catch.h"

namespace nrl::ops::gemm {
namespace {

constexpr Architecture ampere = Architecture::sm80, hopper = Architecture::sm90,
                       blackwell = Architecture::sm100;

GemmPlan plan_of(DType in, DType out, int64_t rows = 64, int64_t cols = 32, int64_t inner = 48) {
  GemmPlan p;
  p.rows = rows;
  p.cols = cols;
  p.inner = inner;
  p.a = {in, inner, false, 16};
  p.b = {in, inner, true, 16};
  p.d = {out, cols, false, 16};
  if (size_of(in) == 1) p.a.scaling = p.b.scaling = Scaling::tensor;
  return p;
}

GemmPlan scaled(Scaling a, Scaling b) {
  GemmPlan p = plan_of(DType::e4m3, DType::bf16, 256, 384, 512);
  p.a.scaling = a;
  p.b.scaling = b;
  return p;
}

bool refused_for(const GemmPlan& p, Architecture where, const char* word) {
  const std::string reason = p.validate(where);
  INFO(reason);
  return reason.find(word) != std::string::npos;
}

TEST_CASE("types that the hardware multiplies", "[gemm]") {
  for (DType t : {DType::bf16, DType::f16}) {
    REQUIRE(plan_of(t, t).validate(ampere).empty());
    REQUIRE(plan_of(t, DType::f32).validate(hopper).empty());
  }
  REQUIRE(plan_of(DType::f32, DType::f32).validate(hopper).empty());
  REQUIRE(refused_for(plan_of(DType::f32, DType::bf16), hopper, "f32 result"));
  REQUIRE(refused_for(plan_of(DType::bf16, DType::f16), hopper, "gives bf16 or f32"));
  GemmPlan mixed = plan_of(DType::bf16, DType::f32);
  mixed.b.dtype = DType::f32;
  REQUIRE(refused_for(mixed, hopper, "one type"));
  GemmPlan fp8 = plan_of(DType::e4m3, DType::bf16);
  REQUIRE(fp8.validate(hopper).empty());
  fp8.a.dtype = DType::e5m2;
  REQUIRE(fp8.validate(hopper).empty());
  fp8.b.dtype = DType::e5m2;
  REQUIRE(refused_for(fp8, hopper, "e5m2 x e5m2"));
}

TEST_CASE("FP8 layouts, sizes and alignment", "[gemm]") {
  const GemmPlan good = plan_of(DType::e4m3, DType::bf16);
  REQUIRE(refused_for(good, ampere, "compute capability"));
  GemmPlan p = good;
  p.b = {DType::e4m3, p.cols, false, 16, Scaling::tensor};  // (inner, cols)
  REQUIRE(refused_for(p, hopper, "transposed copies"));
  REQUIRE(p.validate(blackwell).empty());
  p = plan_of(DType::e4m3, DType::bf16, 64, 32, 40);
  p.a.ld = p.b.ld = 48;
  REQUIRE(refused_for(p, hopper, "multiples of 16"));
  p = good;
  p.a.ld = 56;
  REQUIRE(refused_for(p, hopper, "16 bytes apart"));
  p = good;
  p.b.alignment = 8;
  REQUIRE(refused_for(p, hopper, "aligned to 16"));
  p = good;
  p.fast_accumulation = true;
  REQUIRE(p.validate(hopper).empty());
  p = plan_of(DType::bf16, DType::bf16);
  p.fast_accumulation = true;
  REQUIRE(refused_for(p, hopper, "FP8"));
}

TEST_CASE("scalings that tensor cores take", "[gemm]") {
  using enum Scaling;
  REQUIRE(scaled(tensor, tensor).validate(hopper).empty());
  REQUIRE(scaled(tensor, tensor).validate(blackwell).empty());
  REQUIRE(refused_for(scaled(none, tensor), hopper, "FP8 operands need scales"));
  REQUIRE(refused_for(scaled(tensor, row128), hopper, "cannot be combined"));
  REQUIRE(refused_for(scaled(mx32, block128), blackwell, "cannot be combined"));
  for (const auto& [a, b] : {std::pair{row128, row128}, {row128, block128}, {block128, row128}}) {
    REQUIRE(scaled(a, b).validate(hopper).empty());
    REQUIRE(refused_for(scaled(a, b), blackwell, "Hopper"));
  }
  REQUIRE(refused_for(scaled(block128, block128), hopper, "one operand must have row128"));
  REQUIRE(scaled(mx32, mx32).validate(blackwell).empty());
  REQUIRE(refused_for(scaled(mx32, mx32), hopper, "Blackwell"));
  GemmPlan p = scaled(tensor, tensor);
  p.d.scaling = tensor;
  REQUIRE(refused_for(p, hopper, "result"));
  p = plan_of(DType::bf16, DType::bf16);
  p.b.scaling = tensor;
  REQUIRE(refused_for(p, hopper, "bf16 operands take no scales"));
}

TEST_CASE("shapes and epilogues of block scaling", "[gemm]") {
  using enum Scaling;
  const GemmPlan good = scaled(row128, block128);
  GemmPlan p = good;
  p.inner = 448;
  REQUIRE(refused_for(p, hopper, "multiples of 128"));
  p = good;
  p.rows = 250;
  REQUIRE(refused_for(p, hopper, "multiples of 8"));
  p = good;
  p.fast_accumulation = true;
  REQUIRE(refused_for(p, hopper, "fast accumulation"));
  p = good;
  p.epilogue = Epilogue::bias;
  REQUIRE(p.validate(hopper).empty());
  p.epilogue = Epilogue::gelu_bias;
  REQUIRE(refused_for(p, hopper, "only a bias"));
  p = scaled(mx32, mx32);
  p.inner = 48;
  REQUIRE(refused_for(p, blackwell, "multiples of 32"));
}

TEST_CASE("plans that differ only in scaling are different", "[gemm]") {
  using enum Scaling;
  const GemmPlan a = scaled(row128, row128), b = scaled(row128, block128);
  REQUIRE(a != b);
  REQUIRE(a.key() != b.key());
  REQUIRE(a.key().find(' ') == std::string::npos);  // one word of the tune file
  std::unordered_map<GemmPlan, int, PlanHash> algorithms{{a, 1}, {b, 2}};
  REQUIRE(algorithms.at(scaled(row128, row128)) == 1);
  REQUIRE(algorithms.at(scaled(row128, block128)) == 2);
  TuneCache tuned("", {"GPU", "library"}, TuneCache::Access::extend);
  tuned.store(a.key(), {1});
  REQUIRE_FALSE(tuned.find(b.key()));
}

TEST_CASE("plans that differ in any field have different hashes", "[gemm]") {
  const GemmPlan plan = plan_of(DType::bf16, DType::bf16);
  std::vector<GemmPlan> plans(16, plan);
  plans[1].rows = 65;
  plans[2].cols = 65;
  plans[3].inner = 65;
  plans[4].a.ld = 65;
  plans[5].b.ld = 65;
  plans[6].a.dtype = DType::f16;
  plans[7].b.transposed = false;
  plans[8].d.alignment = 8;
  plans[9].a.scaling = Scaling::tensor;
  plans[10].epilogue = Epilogue::bias;
  plans[11].aux.ld = 65;
  plans[12].bias = DType::f32;
  plans[13].accumulate = true;
  plans[14].compute = Compute::tf32;
  plans[15].fast_accumulation = true;
  std::unordered_set<size_t> hashes;
  for (const GemmPlan& p : plans) hashes.insert(PlanHash{}(p));
  REQUIRE(hashes.size() == plans.size());
}

TEST_CASE("operands of a linear layer keep their scales", "[gemm]") {
  std::vector<char> memory(256 * 256);
  Tensor x = make_tensor(memory.data(), DType::e4m3, {256, 256}), w = x;
  const ScaleMatrix layout = scale_matrix(Scaling::row128, 256, 256);
  x.scales = {memory.data(), nullptr, Scaling::row128, layout.row_step, layout.column_step};
  w.scales.kind = Scaling::tensor;
  const LinearForward a{.x = x, .weight = w, .out = make_tensor(memory.data(), DType::bf16, {256, 256})};
  const GemmPlan plan = gpu::forward_plan(a, Compute::f32);
  REQUIRE(plan.a.scaling == Scaling::row128);
  REQUIRE(plan.b.scaling == Scaling::tensor);
  REQUIRE(plan.d.scaling == Scaling::none);
  LinearForward sliced = a;
  sliced.x = x.rows(0, 128);
  REQUIRE_THROWS_AS(gpu::forward_plan(sliced, Compute::f32), Error);
}

TEST_CASE("epilogues", "[gemm]") {
  GemmPlan p = plan_of(DType::bf16, DType::bf16);
  p.epilogue = Epilogue::gelu_aux_bias;
  p.aux = p.d;
  REQUIRE(p.validate(hopper).empty());
  p.aux.ld = 36;
  REQUIRE(refused_for(p, hopper, "auxiliary"));
  p.aux = p.d;
  p.aux.dtype = DType::f32;
  REQUIRE(refused_for(p, hopper, "auxiliary matrix must be bf16"));
  p.aux = p.d;
  p.bias = DType::f32;
  REQUIRE(refused_for(p, hopper, "bias"));
  // A bias has the result's type; the f32 results of FP8 operands have one of bf16.
  p = plan_of(DType::bf16, DType::f32);
  p.epilogue = Epilogue::bias;
  REQUIRE(refused_for(p, hopper, "a bias of bf16 with a result of f32"));
  p.bias = DType::f32;
  REQUIRE(p.validate(hopper).empty());
  p = plan_of(DType::e4m3, DType::f32);
  p.epilogue = Epilogue::bias;
  REQUIRE(p.validate(hopper).empty());
  p.bias = DType::f16;
  REQUIRE(refused_for(p, hopper, "no bias in f16 to f32"));
  p.bias = DType::f32;
  REQUIRE(refused_for(p, hopper, "no bias in f32 to f32"));
  p = plan_of(DType::e4m3, DType::bf16);
  p.epilogue = Epilogue::bias;
  REQUIRE(p.validate(hopper).empty());
  p.bias = DType::f16;
  REQUIRE(refused_for(p, hopper, "no bias in f16 to bf16"));
  p = plan_of(DType::f32, DType::f32);
  p.epilogue = Epilogue::dgelu;
  p.aux = p.d;
  REQUIRE(refused_for(p, hopper, "16-bit"));
  p = plan_of(DType::bf16, DType::f32);
  p.accumulate = true;
  REQUIRE(p.validate(hopper).empty());
  p.epilogue = Epilogue::bias;
  REQUIRE(refused_for(p, hopper, "accumulating"));
}

TEST_CASE("sizes and rows", "[gemm]") {
  GemmPlan p = plan_of(DType::bf16, DType::bf16, 0);
  REQUIRE(refused_for(p, hopper, "empty"));
  p = plan_of(DType::bf16, DType::bf16);
  p.a.ld = 40;
  REQUIRE(refused_for(p, hopper, "elements between rows"));
  p = plan_of(DType::bf16, DType::bf16);
  p.d.alignment = 1;
  REQUIRE(refused_for(p, hopper, "aligned to 1"));
  p = plan_of(DType::bf16, DType::bf16);
  p.compute = Compute::tf32;
  REQUIRE(refused_for(p, hopper, "tf32"));
}

TEST_CASE("a linear layer's products as the library sees them", "[gemm]") {
  std::vector<bf16> memory(1);
  auto matrix = [&](DType t, int64_t r, int64_t c) { return make_tensor(memory.data(), t, {r, c}); };
  const int64_t n = 5, k = 7, m = 3;
  const Tensor x = matrix(DType::bf16, n, k), w = matrix(DType::bf16, m, k), y = matrix(DType::bf16, n, m),
               dw = matrix(DType::f32, m, k);
  auto same = [](const ColumnMajor& c, int64_t cm, int64_t cn, int64_t ck, bool ta, bool tb, int64_t ar,
                 int64_t ac, int64_t br, int64_t bc) {
    return c.m == cm && c.n == cn && c.k == ck && c.transpose_a == ta && c.transpose_b == tb &&
           c.a_rows == ar && c.a_cols == ac && c.b_rows == br && c.b_cols == bc;
  };
  // y = x W^T: A = W transposed, B = x.
  REQUIRE(same(column_major(gpu::forward_plan({.x = x, .weight = w, .bias = {}, .out = y}, Compute::f32)), m,
               n, k, true, false, k, m, k, n));
  // dx = dy W: A = W, B = dy.
  REQUIRE(same(column_major(gpu::backward_data_plan({.dout = y, .weight = w, .dx = x}, Compute::f32)), k, n,
               m, false, false, k, m, m, n));
  // dW = dy^T x: A = x, B = dy transposed; added to.
  const GemmPlan wgrad =
      gpu::backward_weight_plan({.dout = y, .x = x, .dweight = dw, .dbias = {}}, Compute::f32);
  REQUIRE(same(column_major(wgrad), k, m, n, false, true, k, n, m, n));
  REQUIRE(wgrad.accumulate);
  REQUIRE(wgrad.d.dtype == DType::f32);
  REQUIRE(wgrad.key() != gpu::backward_data_plan({.dout = y, .weight = w, .dx = x}, Compute::f32).key());
  REQUIRE(wgrad.flops() == 2.0 * 5 * 7 * 3);
}

}  // namespace
}  // namespace nrl::ops::gemm
