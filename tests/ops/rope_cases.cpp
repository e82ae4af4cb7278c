#include <cmath>

#include "core/ops/rope.h"
#include "core/ops/transfer.h"
#include "tests/ops/cases.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;

Buffer table_of(DType t, const RopeSpec& spec, int64_t positions) {
  const std::vector<float> values = rope_table(spec, positions, positions);
  Buffer table(t, {positions, spec.rotary_dim});
  for (int64_t i = 0; i < table.size(); ++i) table.set(i, static_cast<double>(values[i]));
  return table;
}

struct Problem {
  Buffer x, y, dout, dx, table, positions;
};

GradProblem gradient(DType t) {
  auto p = std::make_shared<Problem>();
  p->x = Buffer(t, {4, 2, 10}).normal("x");
  p->dout = Buffer(t, {4, 2, 10}).normal("dout");
  p->table =
      table_of(t, {.kind = RopeKind::yarn, .rotary_dim = 6, .factor = 4, .original_max_position = 8}, 9);
  p->positions = Buffer(DType::i32, {4}).integers("positions", 0, 9);
  p->dx = Buffer(t, {4, 2, 10});
  GradProblem g;
  g.inputs = {&p->x};
  g.gradients = {&p->dx};
  g.loss = [p](Exec& e) {
    p->y = p->x;
    e.kernels->rope(e, {.x = p->y, .table = p->table, .positions = p->positions});
    return dot(p->y, p->dout);
  };
  g.backward = [p](Exec& e) {
    for (int64_t i = 0; i < p->dx.size(); ++i) p->dx.set(i, p->dout.get(i));
    e.kernels->rope(e, {.x = p->dx, .table = p->table, .positions = p->positions, .inverse = true});
  };
  return g;
}

/// The angle that the table holds for frequency i at position 1.
double frequency(const RopeSpec& spec, int64_t i, int64_t sequence = 0) {
  const std::vector<float> t = rope_table(spec, 2, sequence);
  const auto at = static_cast<size_t>(spec.rotary_dim + i), half = static_cast<size_t>(spec.rotary_dim / 2);
  return std::atan2(static_cast<double>(t[at + half]), static_cast<double>(t[at]));
}

bool near(double a, double b) {
  return std::fabs(a - b) <= 2e-6 * std::fabs(b);
}

void check_kinds(Exec&) {
  // Llama 3.1: theta 5e5, d 128, factor 8, 1 / 4, original 8192. Wavelength of i = 20 is below 2048 (kept),
  // that of i = 60 above 8192 (divided); i = 32 (wavelength 4442.9) is blended with s = (8192 / 4442.883 - 1)
  // / 3 = 0.281286.
  const RopeSpec llama{
      .kind = RopeKind::llama3, .rotary_dim = 128, .theta = 5e5, .factor = 8, .original_max_position = 8192};
  auto plain = [](double theta, double d, double i) { return std::pow(theta, -2.0 * i / d); };
  expect(near(frequency(llama, 20), plain(5e5, 128, 20)), "llama3 keeps short wavelengths");
  expect(near(frequency(llama, 60), plain(5e5, 128, 60) / 8), "llama3 stretches long wavelengths");
  expect(near(frequency(llama, 32), 5.2484616e-4), fmt::format("llama3 blends: {}", frequency(llama, 32)));
  const RopeSpec linear{.kind = RopeKind::linear, .rotary_dim = 64, .factor = 4};
  expect(near(frequency(linear, 5), plain(1e4, 64, 5) / 4), "linear divides");
  const RopeSpec standard{.rotary_dim = 64};
  expect(near(frequency(standard, 5), plain(1e4, 64, 5)), "standard");
  // Dynamic: base 1e4 * (2 * 4096 / 2048 - 1)^(64 / 62) at twice the original length; unchanged below it.
  const RopeSpec dynamic{
      .kind = RopeKind::dynamic, .rotary_dim = 64, .factor = 2, .original_max_position = 2048};
  expect(near(frequency(dynamic, 31, 4096), plain(1e4 * std::pow(3.0, 64.0 / 62.0), 64, 31)),
         "dynamic stretches");
  expect(near(frequency(dynamic, 31, 1024), plain(1e4, 64, 31)), "dynamic leaves short sequences alone");
  // YaRN, d 64, theta 1e4, original 2048: turns 32 at dimension 8.06 -> 8, turns 1 at 20.1 -> 21.
  const RopeSpec yarn{.kind = RopeKind::yarn, .rotary_dim = 64, .factor = 4, .original_max_position = 2048};
  expect(near(frequency(yarn, 8), plain(1e4, 64, 8)), "yarn keeps dimensions below the ramp");
  expect(near(frequency(yarn, 21), plain(1e4, 64, 21) / 4), "yarn stretches dimensions above the ramp");
  expect(near(frequency(yarn, 12), plain(1e4, 64, 12) * (1.0 - 4.0 / 13.0 * 0.75)),
         "yarn blends on the ramp");
  const float scale = rope_table(yarn, 1, 1)[0];
  expect(near(static_cast<double>(scale), 0.1 * std::log(4.0) + 1.0), "yarn scales by the attention factor");
  RopeSpec given = yarn;
  given.attention_factor = 0.5;
  expect(rope_table(given, 1, 1)[0] == 0.5f, "yarn takes a given attention factor");
  RopeSpec exact = yarn;
  exact.truncate = false;
  expect(frequency(exact, 12) != frequency(yarn, 12), "yarn without truncation");
}

}  // namespace

NRL_OP_CASES(rope) {
  for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    struct Head {
      int64_t d, rotary, gap = 5;
    };
    for (auto [d, rotary, gap] :
         {Head{2, 2}, {31, 14}, {64, 64}, {64, 62}, {257, 128}, {64, 64, 16}, {128, 32, 0}, {88, 48, 8}}) {
      for (auto [n, heads] : {std::pair<int64_t, int64_t>{1, 1}, {7, 3}, {301, 4}, {5, 9}}) {
        for (bool inverse : {false, true}) {
          registry.tests.push_back({fmt::format("rope.{} ({}, {}, {}) gap {} rotary {} {}", name_of(dtype), n,
                                                heads, d, gap, rotary, inverse),
                                    [=](Exec& e) -> Outputs {
                                      Buffer x = Buffer(dtype, {n, heads, d}, gap).normal("x");
                                      const Buffer table = table_of(DType::f32, {.rotary_dim = rotary}, 50);
                                      const Buffer positions =
                                          Buffer(DType::i32, {n}).integers("positions", 0, 50);
                                      Buffer amax = Buffer(DType::f32, {1}).fill(0.25);
                                      rope(e, {.x = x,
                                               .table = table,
                                               .positions = positions,
                                               .inverse = inverse,
                                               .amax = inverse ? amax.tensor() : Tensor{}});
                                      synchronize(e);
                                      double largest = 0.25;
                                      for (int64_t i = 0; inverse && i < x.size(); ++i)
                                        if (i % d < rotary) largest = std::max(largest, std::fabs(x.get(i)));
                                      expect(amax.get(0) == largest, "largest magnitude");
                                      return {{"x", x, 2}};
                                    },
                                    true});
        }
      }
    }
  }
  registry.grads.push_back({"rope", gradient});
  registry.properties.push_back({"rope.kinds", check_kinds});
}

}  // namespace nrl::ops_test
