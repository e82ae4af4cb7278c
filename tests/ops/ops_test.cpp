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

  auto erf = [](float x) { return test_isa::erf_f32(x); };
  CHECK(worst_ulps(-6.0, 6.0, 200000, erf, [](double x) { return std::erf(x); }) < 2.0);
  CHECK(worst_ulps(-1e-3, 1e-3, 10000, erf, [](double x) { return std::erf(x); }) < 2.0);
  CHECK(test_isa::erf_f32(INFINITY) == 1.0f);
  CHECK(test_isa::erf_f32(-INFINITY) == -1.0f);
  CHECK(std::isnan(test_isa::erf_f32(NAN)));
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

TEST_CASE("an instruction set that the processor lacks is refused") {
  if (cpu::best_isa() == cpu::Isa::avx512_bf16) return;
  CHECK(refuses([] { cpu_kernels(cpu::Isa::avx512_bf16); }, "avx512_bf16"));
}
