// What the table-driven program does not cover: coverage, checks of the dispatch functions, accuracy of
// the vector mathematics.

#define NRL_ISA test_isa
#include <cmath>
#include <cstddef>
#include <limits>

#include "core/ops/coverage.h"
#include "core/ops/shared/cpu/simd.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::ops;

namespace {

/// Error of a f32 result in units of the last place of the true value.
double ulps(float got, double want) {
  const float nearest = static_cast<float>(want);
  const double unit = static_cast<double>(std::nextafter(std::fabs(nearest), INFINITY)) - std::fabs(nearest);
  return std::fabs(static_cast<double>(got) - want) / unit;
}

template <class Got, class Want>
double worst_ulps(double low, double high, int steps, const Got& got, const Want& want) {
  double worst = 0;
  for (int i = 0; i <= steps; ++i) {
    const auto x = static_cast<float>(low + (high - low) * i / steps);
    worst = std::max(worst, ulps(got(x), want(static_cast<double>(x))));
  }
  return worst;
}

void no_op(Exec&, const NormForward&) {}

bool refuses(const std::function<void()>& call, const std::string& part) {
  try {
    call();
  } catch (const Error& e) {
    INFO(e.what());
    CHECK(std::string(e.what()).find(part) != std::string::npos);
    return e.code() == Exit::internal;
  }
  return false;
}

}  // namespace

TEST_CASE("exp and erf of the kernels are accurate to two units in the last place") {
  auto exp = [](float x) { return test_isa::exp_f32(x); };
  CHECK(worst_ulps(-87.0, 88.7, 200000, exp, [](double x) { return std::exp(x); }) < 1.5);
  CHECK(worst_ulps(-1.0, 1.0, 100000, exp, [](double x) { return std::exp(x); }) < 1.5);
  CHECK(worst_ulps(-103.0, -87.0, 10000, exp, [](double x) { return std::exp(x); }) < 1.5);
  CHECK(test_isa::exp_f32(-INFINITY) == 0.0f);
  CHECK(test_isa::exp_f32(-1e30f) == 0.0f);
  CHECK(test_isa::exp_f32(0.0f) == 1.0f);
  CHECK(std::isinf(test_isa::exp_f32(INFINITY)));
  CHECK(std::isinf(test_isa::exp_f32(89.0f)));
  CHECK(std::isnan(test_isa::exp_f32(NAN)));

  auto erf = [](float x) { return test_isa::erf_with<test_isa::SimdMath>(x); };
  CHECK(worst_ulps(-6.0, 6.0, 200000, erf, [](double x) { return std::erf(x); }) < 2.0);
  CHECK(worst_ulps(-1e-3, 1e-3, 10000, erf, [](double x) { return std::erf(x); }) < 2.0);
  CHECK(test_isa::erf_with<test_isa::SimdMath>(INFINITY) == 1.0f);
  CHECK(test_isa::erf_with<test_isa::SimdMath>(-INFINITY) == -1.0f);
  CHECK(std::isnan(test_isa::erf_with<test_isa::SimdMath>(NAN)));
}

TEMPLATE_TEST_CASE("the vector store of 16 bits rounds like the element type", "", bf16, f16) {
  for (uint64_t u = 0; u < (uint64_t{1} << 32); u += 65521) {
    const float f = std::bit_cast<float>(static_cast<uint32_t>(u));
    TestType stored;
    test_isa::store(stored, f);
    if (stored.bits != TestType(f).bits) FAIL("differs for bits " << u);
  }
  for (float f : {INFINITY, -INFINITY, NAN, std::numeric_limits<float>::max(), -0.0f}) {
    TestType stored;
    test_isa::store(stored, f);
    CHECK(stored.bits == TestType(f).bits);
  }
}

TEST_CASE("the exponential for 16-bit results is accurate to 2^-16") {
  const auto error = [](float x) {
    const double want = std::exp(static_cast<double>(x));
    return std::fabs(static_cast<double>(test_isa::fast_exp(x)) - want) / want;
  };
  double worst = 0;
  for (int i = 0; i <= 200000; ++i)
    worst = std::max(worst, error(-87.0f + 174.0f * static_cast<float>(i) / 2e5f));
  CHECK(worst < 0x1p-16);
  CHECK(test_isa::fast_exp(-INFINITY) < 1e-44f);
  CHECK(test_isa::fast_exp(INFINITY) == test_isa::fast_exp(87.0f));
  CHECK(std::isnan(test_isa::fast_exp(NAN)));
}

TEMPLATE_TEST_CASE("vectors are loaded and stored as single elements", "", float, bf16, f16) {
  using test_isa::lanes;
  constexpr int n = 3 * lanes - 1;
  TestType x[n], y[n + 1];
  for (int i = 0; i < n; ++i) x[i] = TestType(static_cast<float>(i) * 1.37f - 3.0f);
  std::fill(std::begin(y), std::end(y), TestType(7.0f));
  double sum = 0;
  test_isa::for_lanes(n, [&](int64_t i, auto part) {
    const test_isa::Lanes v = part.load(x + i) * 3.0f;
    for (int l = 0; l < lanes; ++l) sum += static_cast<double>(part.existing(v + 1.0f)[l]);
    part.store(y + i, v);
  });
  double want = 0;
  for (int i = 0; i < n; ++i) {
    CHECK(static_cast<float>(y[i]) == static_cast<float>(TestType(static_cast<float>(x[i]) * 3.0f)));
    want += static_cast<double>(static_cast<float>(x[i]) * 3.0f + 1.0f);
  }
  CHECK(sum == want);
  CHECK(static_cast<float>(y[n]) == 7.0f);
}

TEST_CASE("missing kernels are found before a run") {
  KernelTable table;
  CHECK(kernel_entries(table).size() == offsetof(KernelTable, bf16_products) / sizeof(void*));
  table.norm_forward = no_op;
  KernelSet needed;
  for (const Kernel k : {Kernel::norm_forward, Kernel::zero, Kernel::adamw}) needed.add(k);
  CHECK(needed.size() == 3);
  try {
    require_kernels(table, needed, "cuda:0");
    FAIL("accepted");
  } catch (const Error& e) {
    CHECK(e.code() == Exit::unavailable);
    CHECK(std::string(e.what()).find("cuda:0 does not have: adamw, zero") != std::string::npos);
  }
}

TEST_CASE("the CPU has every kernel") {
  for (const KernelEntry& entry : kernel_entries(cpu_kernels(cpu::best_isa()))) {
    INFO(entry.name);
    CHECK(entry.present);
  }
}

TEST_CASE("dispatch functions refuse arguments that the kernels do not support") {
  std::vector<float> memory(4096);
  std::vector<int32_t> ids(16);
  std::vector<std::byte> scratch(64);
  Exec exec;
  exec.kernels = &cpu_kernels(cpu::Isa::baseline);
  exec.threads = 2;
  exec.workspace = {scratch.data(), scratch.size()};
  auto f32 = [&](int64_t at, std::initializer_list<int64_t> shape) {
    return make_tensor(memory.data() + at, DType::f32, shape);
  };

  NormForward norm;
  norm.x = f32(0, {4, 8});
  norm.weight = f32(100, {8});
  norm.out = f32(200, {4, 9});
  CHECK(refuses([&] { norm_forward(exec, norm); }, "out is f32[4, 9]"));
  norm.out = f32(3, {4, 8});
  CHECK(refuses([&] { norm_forward(exec, norm); }, "overlaps"));
  norm.out = f32(200, {4, 8});
  norm.bias = f32(300, {8});
  CHECK(refuses([&] { norm_forward(exec, norm); }, "bias"));
  norm.bias = {};
  norm_forward(exec, norm);
  std::swap(norm.x.stride[0], norm.x.stride[1]);
  CHECK(refuses([&] { norm_forward(exec, norm); }, "contiguous last dimension"));

  NormBackward back;
  back.x = f32(0, {4, 8});
  back.dout = f32(200, {4, 8});
  back.dx = f32(400, {4, 8});
  back.weight = f32(100, {8});
  back.rstd = f32(300, {4});
  CHECK(refuses([&] { norm_backward(exec, back); }, "workspace"));

  ActivationForward act;
  act.gated = true;
  act.x = f32(0, {4, 8});
  act.out = f32(200, {4, 8});
  CHECK(refuses([&] { activation_forward(exec, act); }, "gated"));

  Rope rotate;
  rotate.x = f32(0, {2, 2, 8});
  rotate.table = f32(200, {16, 10});
  rotate.positions = make_tensor(ids.data(), DType::i32, {2});
  CHECK(refuses([&] { rope(exec, rotate); }, "table is f32[16, 10]"));
  CHECK(refuses([&] { rope_table({.rotary_dim = 7}, 4, 4); }, "rotary_dim 7"));

  CrossEntropy ce;
  ce.logits = f32(0, {4, 8});
  ce.target = make_tensor(ids.data(), DType::i32, {3});
  ce.log_prob = f32(200, {4});
  CHECK(refuses([&] { cross_entropy(exec, ce); }, "target"));
  ce.target = make_tensor(ids.data(), DType::i32, {4});
  ce.inverse_temperature = 0;
  CHECK(refuses([&] { cross_entropy(exec, ce); }, "inverse_temperature 0"));
  ce.inverse_temperature = 2;
  ce.weight = f32(210, {4});
  CHECK(refuses([&] { cross_entropy(exec, ce); }, "inverse_temperature 2"));
  ce.inverse_temperature = 1;
  ce.entropy = f32(220, {4});
  CHECK(refuses([&] { cross_entropy(exec, ce); }, "entropy is f32[4]"));
  ce.weight = {};
  ce.statistics = f32(230, {1, 4, 3});
  CHECK(refuses([&] { cross_entropy(exec, ce); }, "statistics"));  // wanted four columns

  CrossEntropyGradient from_lse{
      .logits = ce.logits, .target = ce.target, .lse = f32(200, {4}), .weight = f32(210, {3})};
  CHECK(refuses([&] { cross_entropy_gradient(exec, from_lse); }, "weight is f32[3]"));
  from_lse.weight = f32(210, {4});
  from_lse.entropy_weight = f32(220, {4});
  CHECK(refuses([&] { cross_entropy_gradient(exec, from_lse); }, "entropy_weight is f32[4]"));
  from_lse.entropy_weight = {};
  from_lse.dlogits = f32(100, {4, 8});
  CHECK(refuses([&] { cross_entropy_gradient(exec, from_lse); }, "dlogits"));

  const auto i32 = [&](std::initializer_list<int64_t> shape) {
    return make_tensor(ids.data(), DType::i32, shape);
  };
  TopColumns top{.logits = f32(0, {4, 8}), .ids = i32({4, 2}), .values = f32(100, {4, 3})};
  CHECK(refuses([&] { top_columns(exec, top); }, "values f32[4, 3]"));
  top.values = f32(100, {4, 2}), top.part_ids = i32({1, 4, 2});
  CHECK(refuses([&] { top_columns(exec, top); }, "logits and parts"));
  top.logits = {}, top.part_values = f32(0, {1, 4, 3});
  CHECK(refuses([&] { top_columns(exec, top); }, "part_values f32[1, 4, 3]"));
  GatherColumns gather{.logits = f32(0, {4, 8}), .ids = i32({4, 2}), .out = f32(100, {4, 3})};
  CHECK(refuses([&] { gather_columns(exec, gather); }, "out is f32[4, 3]"));
  gather.ids = i32({3, 2});
  CHECK(refuses([&] { gather_columns(exec, gather); }, "ids are i32[3, 2]"));
  TopkKl kl{
      .student = f32(0, {2, 4}), .teacher = f32(50, {2, 3}), .target = i32({2}), .score = f32(100, {2})};
  CHECK(refuses([&] { topk_kl(exec, kl); }, "teacher is f32[2, 3]"));
  kl.teacher = f32(50, {2, 4});
  topk_kl(exec, kl);
  kl.lse = f32(110, {2});
  CHECK(refuses([&] { topk_kl(exec, kl); }, "lse"));
  kl.options.zero_outside = true;
  topk_kl(exec, kl);
  kl.options.type = KlDirection::reverse;
  CHECK(refuses([&] { topk_kl(exec, kl); }, "entropy"));
  kl.entropy = f32(120, {2});
  kl.weight = f32(130, {2});
  CHECK(refuses([&] { topk_kl(exec, kl); }, "gradient"));
  kl.gradient = f32(2, {2, 4});
  CHECK(refuses([&] { topk_kl(exec, kl); }, "gradient"));
  kl.gradient = kl.student;
  CHECK(refuses([&] { topk_kl(exec, kl); }, "rest"));
  kl.rest = f32(140, {2, 2});
  kl.options.temperature = 0;
  CHECK(refuses([&] { topk_kl(exec, kl); }, "temperature 0"));
  ScatterColumns scatter{.logits = f32(0, {2, 8}), .ids = i32({2, 2}), .gradient = f32(100, {2, 3})};
  CHECK(refuses([&] { scatter_columns(exec, scatter); }, "gradient is f32[2, 3]"));
  scatter.gradient = f32(100, {2, 2});
  scatter.rest = f32(110, {2, 2});
  CHECK(refuses([&] { scatter_columns(exec, scatter); }, "lse"));
  scatter.rest = {};
  scatter.dlogits = f32(200, {2, 8});
  CHECK(refuses([&] { scatter_columns(exec, scatter); }, "dlogits are f32[2, 8]"));

  Dropout drop;
  drop.x = f32(0, {4, 8});
  drop.out = f32(200, {4, 8});
  drop.p = 1.0f;
  CHECK(refuses([&] { dropout(exec, drop); }, "p 1"));

  AdamW update;
  update.param = update.exp_avg = update.exp_avg_sq = f32(0, {8});
  update.grad = f32(100, {7});
  CHECK(refuses([&] { adamw(exec, update); }, "f32[7]"));
  CHECK(refuses([&] { convert(exec, {.x = f32(0, {8}), .out = f32(1, {8})}); }, "convert"));
}

TEST_CASE("how kernels multiply bf16 is known without them") {
  using enum cpu::Isa;
  for (cpu::Isa isa : {baseline, avx2, avx512, avx512_bf16, avx512_amx})
    if (isa <= cpu::best_isa()) CHECK(cpu_kernels(isa).bf16_products == bf16_products(isa));
  CHECK(bf16_products(avx512_amx) == Bf16Products::amx);
}

TEST_CASE("an instruction set that the processor lacks is refused") {
  if (cpu::best_isa() == cpu::Isa::avx512_amx) return;
  CHECK(refuses([] { cpu_kernels(cpu::Isa::avx512_amx); }, "avx512_amx"));
}
