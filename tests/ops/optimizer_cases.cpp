#include "core/ops/optimizer/optimizer.h"

#include <cmath>

#include "tests/ops/cases.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;

Outputs steps(Exec& e, int64_t n, bool low, bool zero_grad) {
  Buffer param = Buffer(DType::f32, {n}).normal("param"), copy(DType::bf16, {n});
  Buffer grad(DType::f32, {n}), m(DType::f32, {n}), v(DType::f32, {n});
  for (int64_t step = 1; step <= 3; ++step) {
    grad.normal("grad" + std::to_string(step), 100.0);
    AdamW a{.param = param,
            .grad = grad,
            .exp_avg = m,
            .exp_avg_sq = v,
            .lr = 1e-2f,
            .beta2 = 0.95f,
            .weight_decay = 0.1f,
            .grad_scale = 0.01f,
            .step = step,
            .zero_grad = zero_grad};
    if (low) a.param_low = copy;
    adamw(e, a);
  }
  return {
      {"param", param, 8}, {"grad", grad}, {"exp_avg", m, 8}, {"exp_avg_sq", v, 8}, {"param_low", copy, 8}};
}

/// sum_of_squares has no tensor result: it is put into one, in double, so that any thread count must give its
/// bits.
Outputs squares(Exec& e, int64_t n, DType dtype) {
  const Buffer x = Buffer(dtype, {n}).normal("x");
  Buffer result(DType::f64, {1});
  result.set(0, sum_of_squares(e, x));
  return {{"sum", result}};
}

void non_finite(Exec& e) {
  Buffer x = Buffer(DType::f32, {100000}).normal("x");
  x.set(77777, INFINITY);
  expect(std::isinf(sum_of_squares(e, x)), "an infinity is lost");
  x.set(5, NAN);
  expect(std::isnan(sum_of_squares(e, x)), "a NaN is lost");
  Buffer low(DType::bf16, {100000});
  convert(e, x, low);
  expect(std::isnan(low.get(5)) && std::isinf(low.get(77777)), "convert loses NaN or infinity");
}

}  // namespace

NRL_OP_CASES(optimizer) {
  for (int64_t n : {1, 7, 64, 257, 40001}) {
    for (bool low : {false, true}) {
      for (bool zero_grad : {false, true}) {
        registry.tests.push_back(
            {fmt::format("adamw ({}) {} {}", n, low ? "bf16 copy" : "", zero_grad ? "zero" : ""),
             [=](Exec& e) { return steps(e, n, low, zero_grad); }, true});
      }
    }
    for (DType from : {DType::f32, DType::bf16}) {
      registry.tests.push_back({fmt::format("sum_of_squares.{} ({})", name_of(from), n),
                                [=](Exec& e) { return squares(e, n, from); }, true});
      for (DType to : {DType::f32, DType::bf16}) {
        registry.tests.push_back({fmt::format("add and convert {} to {} ({})", name_of(from), name_of(to), n),
                                  [=](Exec& e) -> Outputs {
                                    const Buffer x = Buffer(from, {n}).normal("x");
                                    Buffer sum = Buffer(to, {n}).normal("y"), copy(to, {n});
                                    Buffer none = Buffer(to, {n}).normal("z");
                                    add(e, x, sum);
                                    convert(e, x, copy);
                                    zero(e, none);
                                    return {{"sum", sum}, {"copy", copy}, {"zero", none}};
                                  },
                                  true});
      }
    }
  }
  registry.properties.push_back({"optimizer.non_finite", non_finite});

  const int64_t n = int64_t{1} << 24;
  for (bool low : {false, true}) {
    registry.perfs.push_back({fmt::format("adamw{} ({})", low ? " with bf16 copy" : "", n), [=] {
                                auto b = std::make_shared<std::vector<Buffer>>(4, Buffer(DType::f32, {n}));
                                auto copy =
                                    std::make_shared<Buffer>(DType::bf16, std::vector<int64_t>{low ? n : 1});
                                return PerfProblem{[=](Exec& e) {
                                                     AdamW a{.param = (*b)[0],
                                                             .grad = (*b)[1],
                                                             .exp_avg = (*b)[2],
                                                             .exp_avg_sq = (*b)[3],
                                                             .lr = 1e-3f};
                                                     if (low) a.param_low = *copy;
                                                     adamw(e, a);
                                                   },
                                                   static_cast<double>(n * (low ? 34 : 32))};
                              }});
  }
  registry.perfs.push_back(
      {fmt::format("sum_of_squares.f32 ({})", n), [=] {
         auto x = std::make_shared<Buffer>(DType::f32, std::vector<int64_t>{n});
         return PerfProblem{[=](Exec& e) { sum_of_squares(e, *x); }, static_cast<double>(n * 4)};
       }});
  for (auto [from, to] : {std::pair{DType::f32, DType::bf16}, {DType::bf16, DType::f32}}) {
    const DType source = from, target = to;
    registry.perfs.push_back(
        {fmt::format("convert {} to {} ({})", name_of(from), name_of(to), n), [=] {
           auto x = std::make_shared<Buffer>(source, std::vector<int64_t>{n});
           auto y = std::make_shared<Buffer>(target, std::vector<int64_t>{n});
           return PerfProblem{[=](Exec& e) { convert(e, *x, *y); }, static_cast<double>(n * 6)};
         }});
  }
  registry.perfs.push_back(
      {fmt::format("add f32 ({})", n), [=] {
         auto x = std::make_shared<Buffer>(DType::f32, std::vector<int64_t>{n});
         auto y = std::make_shared<Buffer>(*x);
         return PerfProblem{[=](Exec& e) { add(e, *x, *y); }, static_cast<double>(n * 12)};
       }});
}

}  // namespace nrl::ops_test
