#include <cmath>

#include "core/ops/cross_entropy.h"
#include "core/ops/cross_entropy/row_plan.h"
#include "core/ops/transfer.h"
#include "tests/ops/cases.h"
#include "tests/ops/gradient_place.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;

struct Problem {
  Buffer logits, work, target, weight, log_prob;
};

GradProblem gradient(DType t) {
  auto p = std::make_shared<Problem>();
  p->logits = Buffer(t, {5, 13}).normal("logits", 2.0);
  p->work = Buffer(t, {5, 13});
  p->target = Buffer(DType::i32, {5}).integers("target", -1, 13);
  p->target.set(2, -1);
  p->weight = Buffer(t, {5}).normal("weight");
  p->log_prob = Buffer(t, {5});
  GradProblem g;
  g.inputs = {&p->logits};
  g.gradients = {&p->work};
  g.reduction_length = 13;
  g.loss = [p](Exec& e) {
    e.kernels->cross_entropy(e, {.logits = p->logits, .target = p->target, .log_prob = p->log_prob});
    return dot(p->log_prob, p->weight);
  };
  g.backward = [p](Exec& e) {
    p->work = p->logits;
    e.kernels->cross_entropy(
        e, {.logits = p->work, .target = p->target, .weight = p->weight, .log_prob = p->log_prob});
  };
  return g;
}

/// The gradient of (n, v) logits whose rows are `gap` longer, as a matrix of its own, in the type of the
/// logits over them, else in `rounded`.
Outputs gradient_in(Exec& e, int64_t n, int64_t v, int64_t gap, Place place, DType dtype = DType::f32,
                    double scale = 3.0, DType rounded = DType::bf16) {
  Buffer logits = Buffer(dtype, {n, v}, gap).normal("logits", scale);
  Buffer target = Buffer(DType::i32, {n}).integers("target", 0, v),
         weight = Buffer(DType::f32, {n}).normal("weight");
  Buffer log_prob(DType::f32, {n}), lse(DType::f32, {n});
  target.set(0, static_cast<double>(v - 1));  // behind the last vector
  if (n > 3) {
    target.set(1, -1);
    weight.set(2, 0.0);
    target.set(3, 0);
  }
  const PlacedGradient placed(logits, place, rounded, gap);
  cross_entropy(e, {.logits = logits,
                    .target = target,
                    .weight = weight,
                    .log_prob = log_prob,
                    .lse = lse,
                    .dlogits = placed.dlogits()});
  synchronize(e);
  return {{"log_prob", log_prob, v}, {"lse", lse, v}, placed.output()};
}

/// Where it is written does not change the gradient, bf16 rounds it once. The rows are longer than what a
/// GPU's block keeps: it reads logits in the front half while it writes there.
void same_everywhere(Exec& e) {
  constexpr int64_t n = 2, v = 40003;
  const Outputs full = gradient_in(e, n, v, 1, Place::over_logits);
  const Outputs apart = gradient_in(e, n, v, 1, Place::apart);
  const Outputs front = gradient_in(e, n, v, 1, Place::front_half);
  Buffer rounded(DType::bf16, {n, v});
  for (int64_t i = 0; i < rounded.size(); ++i) rounded.set(i, full[2].value.get(i));
  expect(same_bits(apart[2].value, rounded), "bf16 is not the rounded gradient");
  expect(same_bits(front[2].value, apart[2].value), "the front half of the logits holds another gradient");
}

/// The gradient over bf16 logits is the gradient over the same logits in f32, rounded. The rows are longer
/// than what a GPU's block keeps.
void bf16_logits_lose_only_the_rounding(Exec& e) {
  constexpr int64_t n = 3, v = 120011;
  Buffer low = Buffer(DType::bf16, {n, v}, 1).normal("logits", 3.0), full(DType::f32, {n, v}, 1);
  for (int64_t i = 0; i < low.size(); ++i) full.set(i, low.get(i));
  const Buffer target = Buffer(DType::i32, {n}).integers("target", 0, v),
               weight = Buffer(DType::f32, {n}).normal("weight");
  Buffer log_prob(DType::f32, {n}), want(DType::f32, {n});
  cross_entropy(e, {.logits = low, .target = target, .weight = weight, .log_prob = log_prob});
  cross_entropy(e, {.logits = full, .target = target, .weight = weight, .log_prob = want});
  synchronize(e);
  for (int64_t r = 0; r < n; ++r)
    expect(std::fabs(log_prob.get(r) - want.get(r)) < 1e-4,
           fmt::format("log-probability {}, of f32 logits {}", log_prob.get(r), want.get(r)));
  for (int64_t i = 0; i < low.size(); ++i)
    expect(std::fabs(low.get(i) - full.get(i)) <= 0x1p-8 * std::fabs(full.get(i)),
           fmt::format("gradient {}: {}, of f32 logits {}", i, low.get(i), full.get(i)));
}

/// A row does not know of the others: the same bits alone and among others.
void rows_are_independent_in(Exec& e, DType dtype) {
  const int64_t v = 777;
  Buffer all = Buffer(dtype, {9, v}).normal("logits", 3.0), log_prob(DType::f32, {9});
  const Buffer target = Buffer(DType::i32, {9}).integers("target", 0, v),
               weight = Buffer(DType::f32, {9}).fill(-0.5);
  Buffer one = all, one_log_prob(DType::f32, {9});
  cross_entropy(e, {.logits = all, .target = target, .weight = weight, .log_prob = log_prob});
  for (int64_t r = 8; r >= 0; --r)
    cross_entropy(e, {.logits = one.tensor().rows(r, 1),
                      .target = target.tensor().rows(r, 1),
                      .weight = weight.tensor().rows(r, 1),
                      .log_prob = one_log_prob.tensor().rows(r, 1)});
  synchronize(e);
  expect(same_bits(all, one) && same_bits(log_prob, one_log_prob), "a row depends on its neighbors");
}
void rows_are_independent(Exec& e) {
  for (const DType dtype : {DType::f32, DType::bf16}) rows_are_independent_in(e, dtype);
}

/// -infinity excludes a token; what is not a number reaches the result.
void non_finite_in(Exec& e, DType dtype) {
  const int64_t v = 6000;
  Buffer logits = Buffer(dtype, {3, v}).normal("logits"), log_prob(DType::f32, {3});
  const Buffer target = Buffer(DType::i32, {3}).fill(7), weight = Buffer(DType::f32, {3}).fill(1);
  for (int64_t i = 8; i < v; ++i) logits.set(i, -INFINITY);
  logits.set(v + 4000, NAN);
  logits.set(2 * v + 4000, INFINITY);
  cross_entropy(e, {.logits = logits, .target = target, .weight = weight, .log_prob = log_prob});
  synchronize(e);
  double sum = 0;
  for (int64_t i = 0; i < 8; ++i) sum += logits.get(i);
  expect(std::isfinite(log_prob.get(0)) &&
             std::fabs(sum) < (dtype == DType::f32 ? 1e-6 + exp_tolerance(e) : 1e-2) && logits.get(4000) == 0,
         "excluded tokens count");
  expect(std::isnan(log_prob.get(1)) && std::isnan(logits.get(v)), "a NaN is lost");
  expect(!std::isfinite(log_prob.get(2)) && std::isnan(logits.get(2 * v)), "an infinity is lost");
}
void non_finite(Exec& e) {
  for (const DType dtype : {DType::f32, DType::bf16}) non_finite_in(e, dtype);
}

/// The columns of the logits in slices, each with its own statistics.
Outputs sliced(Exec& e, int64_t n, const std::vector<int64_t>& cuts, DType dtype, Place place, bool weighted,
               double scale = 3.0) {
  const int64_t v = cuts.back(), slices = std::ssize(cuts) - 1;
  Buffer logits = Buffer(dtype, {n, v}, 1).normal("logits", scale), got(DType::bf16, {n, v});
  Buffer target = Buffer(DType::i32, {n}).integers("target", 0, v),
         weight = Buffer(DType::f32, {n}).normal("weight");
  if (n > 3) {
    target.set(0, static_cast<double>(v - 1));
    target.set(1, -1);
    weight.set(2, 0.0);
    target.set(3, static_cast<double>(cuts[1]));
  }
  Buffer statistics(DType::f32, {slices, n, 3}), log_prob(DType::f32, {slices, n});
  const auto columns = [&](int64_t s) {
    const auto i = static_cast<size_t>(s);
    return std::pair(cuts[i], cuts[i + 1] - cuts[i]);
  };
  for (int64_t s = 0; s < slices; ++s) {
    const auto [first, count] = columns(s);
    cross_entropy_statistics(
        e, {.logits = logits.tensor().columns(first, count),
            .target = target,
            .first_column = first,
            .out = make_tensor(statistics.tensor().ptr<float>() + s * n * 3, DType::f32, {n, 3})});
  }
  for (int64_t s = 0; s < slices; ++s) {
    const auto [first, count] = columns(s);
    CrossEntropy a{.logits = logits.tensor().columns(first, count),
                   .target = target,
                   .weight = weighted ? weight.tensor() : Tensor{},
                   .log_prob = make_tensor(log_prob.tensor().ptr<float>() + s * n, DType::f32, {n}),
                   .first_column = first,
                   .statistics = statistics};
    if (place == Place::apart) a.dlogits = got.tensor().columns(first, count);
    cross_entropy(e, a);
  }
  synchronize(e);
  Outputs outputs{{"statistics", statistics, v}, {"log_prob", log_prob, v}};
  if (place == Place::apart)
    outputs.push_back({"dlogits", got, v});
  else
    outputs.push_back({"logits", logits, v});
  return outputs;
}

/// One slice is the whole, and any other division gives the same up to the order of additions.
void slices_are_the_whole(Exec& e) {
  constexpr int64_t n = 9, v = 9000;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Outputs whole = gradient_in(e, n, v, 1, Place::over_logits, dtype);
    for (const std::vector<int64_t>& cuts :
         {std::vector<int64_t>{0, v}, {0, 4500, v}, {0, 1, 2999, 3002, v}}) {
      // The whole has its special rows elsewhere.
      const Outputs parts = sliced(e, n, cuts, dtype, Place::over_logits, true);
      const auto row_of = [&](int64_t i) { return i / v; };
      for (int64_t i = 4 * v; i < n * v; ++i)
        expect(std::fabs(parts[2].value.get(i) - whole[2].value.get(i)) <=
                   (dtype == DType::f32 ? 1e-6 : 0x1p-7) * std::fabs(whole[2].value.get(i)) + 1e-7,
               fmt::format("gradient of row {} in {} slices", row_of(i), cuts.size() - 1));
      for (int64_t s = 0; s + 1 < std::ssize(cuts); ++s)
        for (int64_t r = 4; r < n; ++r)
          expect(
              std::fabs(parts[1].value.get(s * n + r) - whole[0].value.get(r)) < 1e-5 + exp_tolerance(e) * 20,
              fmt::format("log-probability of row {} in {} slices", r, cuts.size() - 1));
    }
  }
}

/// A slice of excluded tokens adds nothing; what is not a number in one slice reaches all.
void non_finite_slices(Exec& e) {
  constexpr int64_t v = 600;
  Buffer logits = Buffer(DType::f32, {2, v}).normal("logits"), statistics(DType::f32, {2, 2, 3});
  const Buffer target = Buffer(DType::i32, {2}).fill(3), weight = Buffer(DType::f32, {2}).fill(1);
  for (int64_t i = v / 2; i < v; ++i) logits.set(i, -INFINITY);
  logits.set(v + 400, NAN);
  Buffer log_prob(DType::f32, {2});
  const auto half = [&](int64_t s) { return logits.tensor().columns(s * v / 2, v / 2); };
  for (int64_t s = 0; s < 2; ++s)
    cross_entropy_statistics(
        e, {.logits = half(s),
            .target = target,
            .first_column = s * v / 2,
            .out = make_tensor(statistics.tensor().ptr<float>() + 6 * s, DType::f32, {2, 3})});
  for (int64_t s = 0; s < 2; ++s)
    cross_entropy(e, {.logits = half(s),
                      .target = target,
                      .weight = weight,
                      .log_prob = log_prob,
                      .first_column = s * v / 2,
                      .statistics = statistics});
  synchronize(e);
  double sum = 0;
  for (int64_t i = 0; i < v; ++i) sum += logits.get(i);
  expect(std::isfinite(log_prob.get(0)) && std::fabs(sum) < 1e-5 && logits.get(v - 1) == 0,
         "excluded tokens count");
  expect(std::isnan(log_prob.get(1)) && std::isnan(logits.get(v)), "a NaN in another slice is lost");
}

GradProblem sliced_gradient(DType t) {
  struct Parts : Problem {
    Buffer statistics;
  };
  auto p = std::make_shared<Parts>();
  static constexpr int64_t cuts[] = {0, 4, 5, 13};
  p->logits = Buffer(t, {5, 13}).normal("logits", 2.0);
  p->work = Buffer(t, {5, 13});
  p->target = Buffer(DType::i32, {5}).integers("target", -1, 13);
  p->target.set(2, -1);
  p->weight = Buffer(t, {5}).normal("weight");
  p->log_prob = Buffer(t, {5});
  p->statistics = Buffer(t, {3, 5, 3});
  const auto run = [p](Exec& e, const Buffer& logits, bool weighted) {
    const auto columns = [&](int s) { return logits.tensor().columns(cuts[s], cuts[s + 1] - cuts[s]); };
    for (int s = 0; s < 3; ++s) {
      Tensor out = p->statistics.tensor();
      out.data = static_cast<std::byte*>(out.data) + s * 15 * size_of(out.dtype);
      e.kernels->cross_entropy_statistics(e, {.logits = columns(s),
                                              .target = p->target,
                                              .first_column = cuts[s],
                                              .out = make_tensor(out.data, out.dtype, {5, 3})});
    }
    for (int s = 0; s < 3; ++s)
      e.kernels->cross_entropy(e, {.logits = columns(s),
                                   .target = p->target,
                                   .weight = weighted ? p->weight.tensor() : Tensor{},
                                   .log_prob = p->log_prob,
                                   .first_column = cuts[s],
                                   .statistics = p->statistics});
  };
  GradProblem g;
  g.inputs = {&p->logits};
  g.gradients = {&p->work};
  g.reduction_length = 13;
  g.loss = [p, run](Exec& e) {
    run(e, p->logits, false);
    return dot(p->log_prob, p->weight);
  };
  g.backward = [p, run](Exec& e) {
    p->work = p->logits;
    run(e, p->work, true);
  };
  return g;
}

void plans(Exec&) {
  const Exec none;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (int64_t v : {1, 100, 32000, 50257, 57000, 128256, 151936, 262144}) {
      const RowPlan plan = row_plan(none, v, dtype, true);
      const int64_t bytes = plan.kept * plan.chunk_bytes();
      expect(bytes <= 225 << 10 && bytes < v * size_of(dtype) + plan.chunk_bytes(),
             fmt::format("{}: {} bytes are kept", v, bytes));
      expect(row_plan(none, v, dtype, false).kept == 0, "a forward pass keeps logits");
    }
    // Rows of small vocabularies stay whole, and two blocks fit on a multiprocessor.
    const int64_t v = (64 << 10) / size_of(dtype);
    const RowPlan small = row_plan(none, v, dtype, true);
    expect(small.kept * small.chunk_bytes() >= 64 << 10 && 2 * small.kept * small.chunk_bytes() <= 225 << 10,
           "small rows");
  }
}

}  // namespace

NRL_OP_CASES(cross_entropy) {
  for (auto [n, v, gap] : {std::tuple<int64_t, int64_t, int64_t>{1, 1, 0},
                           {4, 3, 1},
                           {5, 64, 0},
                           {7, 50, 1},
                           {5, 2053, 0},
                           {4, 16384, 8},
                           {4, 40003, 2}}) {
    registry.tests.push_back(
        {fmt::format("cross_entropy ({}, {}) gap {} gradient over bf16 logits", n, v, gap),
         [=](Exec& e) { return gradient_in(e, n, v, gap, Place::over_logits, DType::bf16); }, true});
    for (Place place : {Place::over_logits, Place::apart, Place::front_half}) {
      const std::string_view name = name_of(place);
      registry.tests.push_back({fmt::format("cross_entropy ({}, {}) gap {} gradient {}", n, v, gap, name),
                                [=](Exec& e) { return gradient_in(e, n, v, gap, place); }, true});
      if (place != Place::over_logits)
        registry.tests.push_back(
            {fmt::format("cross_entropy ({}, {}) gap {} gradient {} in f16", n, v, gap, name),
             [=](Exec& e) { return gradient_in(e, n, v, gap, place, DType::f32, 3.0, DType::f16); }, true});
    }
  }
  // Longer than what a block keeps, at the size of a real vocabulary; rows at odd addresses.
  for (auto [v, gap] : {std::pair<int64_t, int64_t>{151936, 0}, {60001, 2}}) {
    registry.tests.push_back(
        {fmt::format("cross_entropy (2, {}) gap {} gradient over bf16 logits", v, gap),
         [=](Exec& e) { return gradient_in(e, 2, v, gap, Place::over_logits, DType::bf16); }, true});
    registry.tests.push_back({fmt::format("cross_entropy (2, {}) gap {} gradient front half", v, gap),
                              [=](Exec& e) { return gradient_in(e, 2, v, gap, Place::front_half); }, true});
  }
  // A block keeps 48 KiB, as much dynamic shared memory as a GPU gives unasked beside no static memory.
  registry.tests.push_back(
      {"cross_entropy (2, 24000) gradient over bf16 logits",
       [](Exec& e) { return gradient_in(e, 2, 24000, 0, Place::over_logits, DType::bf16); }, true});
  registry.properties.push_back({"cross_entropy.same_everywhere", same_everywhere});
  registry.properties.push_back(
      {"cross_entropy.bf16_logits_lose_only_the_rounding", bf16_logits_lose_only_the_rounding});
  registry.properties.push_back({"cross_entropy.rows_are_independent", rows_are_independent});
  registry.properties.push_back({"cross_entropy.non_finite", non_finite});
  registry.properties.push_back({"cross_entropy.plans", plans});
  const std::vector<int64_t> divisions[] = {
      {0, 1, 2}, {0, 17, 34, 50}, {0, 2053, 4106}, {0, 8001, 16002, 40003}, {0, 75968, 151936}};
  for (const std::vector<int64_t>& cuts : divisions)
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const bool weighted : {false, true})
        for (const Place place : {Place::over_logits, Place::apart}) {
          if (place == Place::apart && (dtype != DType::f32 || !weighted)) continue;
          registry.tests.push_back({fmt::format("cross_entropy {} of {} in {} slices{}{}", name_of(dtype),
                                                cuts.back(), cuts.size() - 1, weighted ? " gradient" : "",
                                                place == Place::apart ? " apart" : ""),
                                    [=](Exec& e) { return sliced(e, 5, cuts, dtype, place, weighted); },
                                    true});
        }
  registry.properties.push_back({"cross_entropy.slices_are_the_whole", slices_are_the_whole, true});
  registry.properties.push_back({"cross_entropy.non_finite_slices", non_finite_slices});
  registry.grads.push_back({"cross_entropy of slices", sliced_gradient});
  for (auto [n, v, dtype] : {std::tuple<int64_t, int64_t, DType>{1, 1, DType::f32},
                             {7, 31, DType::f32},
                             {61, 257, DType::f32},
                             {3, 5001, DType::f32},
                             {5, 32003, DType::f32},
                             {7, 31, DType::bf16},
                             {5, 32003, DType::bf16}}) {
    for (double scale : {1.0, 30.0}) {
      for (bool weighted : {false, true}) {
        for (bool with_lse : {false, true}) {
          registry.tests.push_back(
              {fmt::format("cross_entropy ({}, {}) {} scale {} {}{}", n, v, name_of(dtype), scale,
                           weighted ? "gradient" : "forward", with_lse ? " lse" : ""),
               [=](Exec& e) -> Outputs {
                 Buffer logits = Buffer(dtype, {n, v}, 3).normal("logits", scale);
                 Buffer target = Buffer(DType::i32, {n}).integers("target", 0, v);
                 Buffer weight = Buffer(DType::f32, {n}).normal("weight");
                 if (n > 2) {
                   target.set(1, -100);
                   weight.set(2, 0.0);
                 }
                 Buffer log_prob(DType::f32, {n}), lse(DType::f32, {n});
                 CrossEntropy a{.logits = logits, .target = target, .log_prob = log_prob};
                 if (weighted) a.weight = weight;
                 if (with_lse) a.lse = lse;
                 cross_entropy(e, a);
                 return {{"logits", logits, v}, {"log_prob", log_prob, v}, {"lse", lse, v}};
               },
               true});
        }
      }
    }
  }
  registry.grads.push_back({"cross_entropy", gradient});
}

}  // namespace nrl::ops_test
