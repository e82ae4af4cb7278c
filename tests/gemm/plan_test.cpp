// The hardware's rules, each both ways, and the mapping to column-major matrices.

#include "core/ops/gemm/plan.h"
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
  p.b = {DType::e4m3, p.cols, false, 16};  // (inner, cols)
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
