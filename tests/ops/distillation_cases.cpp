#include <cmath>

#include "core/ops/distillation.h"
#include "core/ops/transfer.h"
#include "tests/ops/cases.h"
#include "tests/ops/gradient_place.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;
using Options = TopkKl::Options;

/// k distinct ids per row of v.
Buffer distinct_ids(int64_t n, int64_t k, int64_t v) {
  Buffer ids(DType::i32, {n, k});
  const int64_t step = v / k;
  for (int64_t r = 0; r < n; ++r)
    for (int64_t j = 0; j < k; ++j) ids.set(r * k + j, static_cast<double>((5 * r + (k - j) * step) % v));
  return ids;
}

/// A softmax over all v logits of a row at temperature t, in double.
struct Softmax {
  std::vector<double> log_p;
  double lse = 0, entropy = 0;
  Softmax(const Buffer& logits, int64_t row, int64_t v, double t) {
    double most = -INFINITY, sum = 0;
    for (int64_t i = 0; i < v; ++i) most = std::max(most, logits.get(row * v + i) / t);
    for (int64_t i = 0; i < v; ++i) sum += std::exp(logits.get(row * v + i) / t - most);
    lse = most + std::log(sum);
    for (int64_t i = 0; i < v; ++i) {
      log_p.push_back(logits.get(row * v + i) / t - lse);
      const double p = std::exp(log_p.back());
      if (p > 0) entropy -= p * log_p.back();
    }
  }
};

struct Problem {
  int64_t n, v, k;
  Options options;
  std::vector<int64_t> cuts;  ///< slices of the columns
  Buffer logits, work, ids, teacher, target, weight, lse, entropy, student, score, gradient, rest;

  Problem(DType logits_type, DType t, int64_t rows, int64_t columns, int64_t ids_per_row, const Options& o,
          std::vector<int64_t> slices, double scale = 2.0)
      : n(rows), v(columns), k(ids_per_row), options(o), cuts(std::move(slices)) {
    logits = Buffer(logits_type, {n, v}, 1).normal("logits", scale);
    ids = distinct_ids(n, k, v);
    teacher = Buffer(t, {n, k}).normal("teacher", 2.0, -3.0);
    target = Buffer(DType::i32, {n}).integers("target", 0, v);
    if (n > 2) target.set(1, -1);
    weight = Buffer(t, {n}).normal("weight");
    lse = Buffer(t, {n}), entropy = Buffer(t, {n}), score = Buffer(t, {n});
    student = Buffer(t, {n, k}), gradient = Buffer(t, {n, k}), rest = Buffer(t, {n, 2});
  }

  bool reverse() const { return options.type != KlDirection::forward; }
  Tensor slice(const Tensor& t, size_t s) const { return t.columns(cuts[s], cuts[s + 1] - cuts[s]); }

  /// Calls the ops by `call`, which is the dispatch functions, or for f64 the kernels themselves.
  template <class Call>
  void forward(const Call& call, bool weighted) {
    for (int64_t i = 0; i < student.size(); ++i) student.set(i, 0);
    for (size_t s = 0; s + 1 < cuts.size(); ++s) {
      Buffer part(student.tensor().dtype, {n, k});
      call(GatherColumns{.logits = slice(logits, s), .ids = ids, .out = part, .first_column = cuts[s]});
      for (int64_t i = 0; i < part.size(); ++i) student.set(i, student.get(i) + part.get(i));
    }
    for (int64_t r = 0; r < n; ++r) {
      const Softmax all(logits, r, v, options.temperature);
      lse.set(r, all.lse);
      entropy.set(r, all.entropy);
    }
    TopkKl a{.student = student, .teacher = teacher, .target = target, .score = score, .options = options};
    if (options.zero_outside) a.lse = lse;
    if (options.zero_outside && reverse()) a.entropy = entropy;
    if (weighted) a.weight = weight, a.gradient = gradient;
    if (weighted && options.zero_outside) a.rest = rest;
    call(a);
  }

  /// Returns the gradient of the logits, by default in `work`.
  template <class Call>
  Buffer backward(const Call& call, Place place = Place::over_logits, DType rounded = DType::bf16) {
    forward(call, true);
    work = logits;
    PlacedGradient placed(work, place, rounded, 1);
    for (size_t s = 0; s + 1 < cuts.size(); ++s) {
      ScatterColumns a{.logits = slice(work, s),
                       .ids = ids,
                       .gradient = gradient,
                       .first_column = cuts[s],
                       .inverse_temperature = static_cast<float>(1.0 / options.temperature)};
      if (options.zero_outside) a.rest = rest, a.lse = lse;
      if (place != Place::over_logits) a.dlogits = slice(placed.dlogits(), s);
      call(a);
    }
    return placed.output().value;
  }
};

/// Calls dispatch functions, and waits.
struct Dispatch {
  Exec& e;
  void operator()(const GatherColumns& a) const { gather_columns(e, a), synchronize(e); }
  void operator()(const TopkKl& a) const { topk_kl(e, a), synchronize(e); }
  void operator()(const ScatterColumns& a) const { scatter_columns(e, a), synchronize(e); }
};
/// Calls kernels of any type.
struct Direct {
  Exec& e;
  void operator()(const GatherColumns& a) const { e.kernels->gather_columns(e, a); }
  void operator()(const TopkKl& a) const { e.kernels->topk_kl(e, a); }
  void operator()(const ScatterColumns& a) const { e.kernels->scatter_columns(e, a); }
};

std::string name_of_options(const Options& o) {
  return fmt::format("{} T {}{}", name_of(o.type), o.temperature, o.zero_outside ? " zero outside" : "");
}

const Options all_options[] = {{},
                               {.type = KlDirection::reverse},
                               {.type = KlDirection::mixed, .mixed_weight = 0.25, .temperature = 2},
                               {.temperature = 0.5, .zero_outside = true},
                               {.type = KlDirection::reverse, .temperature = 4, .zero_outside = true},
                               {.type = KlDirection::mixed, .mixed_weight = 0.75, .zero_outside = true}};

/// dLoss/dlogit of a whole row by the definition of the divergence.
std::vector<double> defined_gradient(const Problem& p, int64_t r, double* score) {
  const double t = p.options.temperature;
  const double forward = p.options.type == KlDirection::forward   ? 1
                         : p.options.type == KlDirection::reverse ? 0
                                                                  : p.options.mixed_weight;
  std::vector<double> q(static_cast<size_t>(p.v)), log_q(q.size(), -100.0);
  std::vector<bool> inside(q.size());
  double sum = 0, p_sum = 0;
  const Softmax student(p.logits, r, p.v, t);
  std::vector<double> log_p = student.log_p, gradient(q.size());
  for (int64_t j = 0; j < p.k; ++j) {
    const auto id = static_cast<size_t>(p.ids.get(r * p.k + j));
    inside[id] = true;
    sum += q[id] = std::exp(p.teacher.get(r * p.k + j) / t);
    p_sum += std::exp(log_p[id]);
  }
  double kl = 0, reverse = 0;
  for (size_t i = 0; i < q.size(); ++i) {
    if (inside[i]) log_q[i] = std::log(q[i] /= sum);
    if (!p.options.zero_outside) log_p[i] -= std::log(p_sum);
    if (!inside[i] && !p.options.zero_outside) continue;
    if (inside[i]) kl += q[i] * (log_q[i] - log_p[i]);
    reverse += std::exp(log_p[i]) * (log_p[i] - log_q[i]);
  }
  *score = -t * t * (forward * kl + (1 - forward) * reverse);
  for (size_t i = 0; i < q.size(); ++i) {
    if (!inside[i] && !p.options.zero_outside) continue;
    const double pi = std::exp(log_p[i]);
    gradient[i] =
        -t * p.weight.get(r) * (forward * (pi - q[i]) + (1 - forward) * pi * (log_p[i] - log_q[i] - reverse));
  }
  return gradient;
}

/// The ops together give the gradient of the definition, in one slice of the vocabulary or several.
void follows_definition(Exec& e) {
  for (const Options& o : all_options)
    for (const std::vector<int64_t>& cuts : {std::vector<int64_t>{0, 203}, {0, 1, 90, 92, 203}}) {
      Problem p(DType::f32, DType::f32, 7, 203, 9, o, cuts);
      p.score.fill(NAN);
      const Buffer got = p.backward(Dispatch{e});
      for (int64_t r = 0; r < p.n; ++r) {
        double score = 0;
        const std::vector<double> want = defined_gradient(p, r, &score);
        const bool counts = p.target.get(r) >= 0;
        expect(
            std::fabs(p.score.get(r) - (counts ? score : 0)) <= 1e-5 * (1 + std::fabs(score)),
            fmt::format("{}: score {} of row {}, expected {}", name_of_options(o), p.score.get(r), r, score));
        double size = 0;
        for (const double g : want) size = std::max(size, std::fabs(g));
        for (int64_t i = 0; i < p.v; ++i)
          expect(std::fabs(got.get(r * p.v + i) - (counts ? want[static_cast<size_t>(i)] : 0)) <=
                     (2e-5 + exp_tolerance(e)) * size,
                 fmt::format("{}: gradient {} of row {}: {}, expected {}", name_of_options(o), i, r,
                             got.get(r * p.v + i), want[static_cast<size_t>(i)]));
      }
    }
}

/// With all tokens as ids it is the divergence of the whole distributions, renormalized or not.
void all_ids_are_the_vocabulary(Exec& e) {
  for (const KlDirection type : {KlDirection::forward, KlDirection::reverse}) {
    Problem part(DType::f32, DType::f32, 5, 24, 24, {.type = type, .temperature = 2}, {0, 24});
    Problem whole(DType::f32, DType::f32, 5, 24, 24, {.type = type, .temperature = 2, .zero_outside = true},
                  {0, 24});
    const Buffer a = part.backward(Dispatch{e}), b = whole.backward(Dispatch{e});
    // 100 times what the k probabilities lack to 1 is the rounding of lse.
    expect(error_of(b, a) < 1e-5 + exp_tolerance(e), "the gradients differ");
    expect(error_of(whole.score, part.score) < 2e-4 + 100 * exp_tolerance(e), "the scores differ");
  }
}

/// A student that is the teacher has score 0, wherever the teacher's numbers have their zero.
void equal_distributions(Exec& e) {
  for (const KlDirection type : {KlDirection::forward, KlDirection::reverse, KlDirection::mixed})
    for (const double shift : {0.0, -20.0}) {
      Problem p(DType::f32, DType::f32, 4, 50, 8, {.type = type}, {0, 50});
      for (int64_t i = 0; i < p.teacher.size(); ++i) {
        const int64_t row = i / p.k, id = static_cast<int64_t>(p.ids.get(i));
        p.teacher.set(i, p.logits.get(row * p.v + id) + shift);
      }
      const Buffer gradient = p.backward(Dispatch{e});
      for (int64_t r = 0; r < p.n; ++r)
        expect(std::fabs(p.score.get(r)) < 2e-6 + exp_tolerance(e), fmt::format("score {}", p.score.get(r)));
      for (int64_t i = 0; i < gradient.size(); ++i)
        expect(std::fabs(gradient.get(i)) < 5e-6 + exp_tolerance(e),
               fmt::format("gradient {}", gradient.get(i)));
    }
}

/// A row without a target has score and gradient 0, whatever its logits; -infinity excludes a token; what is
/// not a number reaches the score.
void padding_and_excluded_tokens(Exec& e) {
  for (const Options& o : all_options) {
    Problem p(DType::f32, DType::f32, 4, 70, 5, o, {0, 70});
    for (int64_t i = 0; i < p.v; ++i) p.logits.set(p.v + i, NAN);
    p.logits.set(2 * p.v + 1, -INFINITY);
    for (int64_t j = 0; j < p.k; ++j) {
      p.ids.set(p.k + j, 0);
      p.ids.set(2 * p.k + j, static_cast<double>(2 + j));
      p.ids.set(3 * p.k + j, static_cast<double>(2 + j));
    }
    p.logits.set(3 * p.v + 4, NAN);
    const Buffer gradient = p.backward(Dispatch{e});
    expect(p.score.get(1) == 0, "padding has a score");
    for (int64_t i = 0; i < p.v; ++i) {
      expect(gradient.get(p.v + i) == 0, "padding has a gradient");
      expect(std::isfinite(gradient.get(2 * p.v + i)), "an excluded token spoils the row");
    }
    expect(gradient.get(2 * p.v + 1) == 0, "an excluded token has a gradient");
    expect(std::isnan(p.score.get(3)) && std::isnan(gradient.get(3 * p.v + 2)), "a NaN is lost");
  }
}

/// Where it is written does not change the gradient, 16 bits round it once. The rows are several chunks of a
/// GPU's block.
void same_everywhere(Exec& e) {
  constexpr int64_t n = 2, v = 4003;
  for (const DType rounded : {DType::bf16, DType::f16})
    for (const int64_t columns : {v, v - 3}) {
      const Options o{.type = KlDirection::mixed, .zero_outside = true};
      Problem full(DType::f32, DType::f32, n, columns, 7, o, {0, columns}), apart = full, front = full;
      const Buffer want = full.backward(Dispatch{e});
      const Buffer a = apart.backward(Dispatch{e}, Place::apart, rounded),
                   b = front.backward(Dispatch{e}, Place::front_half, rounded);
      const double unit = rounded == DType::bf16 ? 0x1p-8 : 0x1p-11;
      for (int64_t i = 0; i < want.size(); ++i)
        expect(std::fabs(a.get(i) - want.get(i)) <= 1.1 * unit * std::fabs(want.get(i)) + 1e-7,
               fmt::format("{} {} is not {} rounded", name_of(rounded), a.get(i), want.get(i)));
      expect(same_bits(a, b), "the first half of the logits holds another gradient");
    }
}

/// The ends of `mixed`, a gradient over the student's logits, and a scale of the loss.
void equivalent_calls(Exec& e) {
  const auto run = [&](const Options& o, bool in_place, double loss_scale) {
    Problem p(DType::f32, DType::f32, 6, 64, 33, o, {0, 64});
    p.forward(Dispatch{e}, true);
    if (in_place || loss_scale != 1) {
      Buffer scale(DType::f64, {1});
      scale.set(0, loss_scale);
      if (in_place) p.gradient = p.student;
      Buffer& student = in_place ? p.gradient : p.student;
      TopkKl a{.student = student,
               .teacher = p.teacher,
               .target = p.target,
               .weight = p.weight,
               .loss_scale = scale,
               .score = p.score,
               .gradient = p.gradient,
               .options = o};
      Dispatch{e}(a);
    }
    return std::pair(p.score, p.gradient);
  };
  const auto forward = run({}, false, 1), reverse = run({.type = KlDirection::reverse}, false, 1);
  const auto same = [](const auto& a, const auto& b) {
    return same_bits(a.first, b.first) && same_bits(a.second, b.second);
  };
  expect(same(run({.type = KlDirection::mixed, .mixed_weight = 1}, false, 1), forward), "mixed 1");
  expect(same(run({.type = KlDirection::mixed, .mixed_weight = 0}, false, 1), reverse), "mixed 0");
  expect(same(run({}, true, 1), forward), "the gradient over the student's logits differs");
  const auto scaled = run({}, false, 8);
  for (int64_t i = 0; i < scaled.second.size(); ++i)
    expect(scaled.second.get(i) == 8 * forward.second.get(i), "a loss scale");
  expect(same_bits(scaled.first, forward.first), "a loss scale changes the score");
}

GradProblem gradient(DType t, const Options& o) {
  auto p = std::make_shared<Problem>(t, t, 4, 13, 5, o, std::vector<int64_t>{0, 4, 5, 13});
  GradProblem g;
  g.inputs = {&p->logits};
  g.gradients = {&p->work};
  g.reduction_length = 13;
  g.loss = [p](Exec& e) {
    p->forward(Direct{e}, false);
    return dot(p->score, p->weight);
  };
  g.backward = [p](Exec& e) { p->backward(Direct{e}); };
  g.keep = p;
  return g;
}

struct Shape {
  int64_t n, v, k;
};

}  // namespace

namespace {

/// Numbers of which several are equal, -0, infinities and NaN.
Buffer numbers_to_select(DType dtype, int64_t n, int64_t v) {
  Buffer x = Buffer(dtype, {n, v}, 3).normal("logits", 2.0);
  for (int64_t r = 0; r < n; ++r)
    for (int64_t i = 0; i < v; ++i)
      if ((i + r) % 3 == 0) x.set(r * v + i, std::round(x.get(r * v + i)));
  const double special[] = {-0.0, 0.0, INFINITY, NAN, -INFINITY, -1e-40};
  if (n > 3 && v > 12)
    for (int64_t i = 0; i < 6; ++i) x.set(3 * v + 2 * i, special[i]);
  return x;
}

/// Slices of any sizes, joined, select what the whole row does.
void same_in_slices(Exec& e) {
  constexpr int64_t n = 6, v = 203;
  const Buffer logits = numbers_to_select(DType::f32, n, v);
  for (const int64_t k : {1, 7, 150, 203}) {
    Buffer want_ids(DType::i32, {n, k}), want(DType::f32, {n, k});
    top_columns(e, {.logits = logits, .ids = want_ids, .values = want});
    for (const std::vector<int64_t>& cuts :
         {std::vector<int64_t>{0, 203}, {0, 100, 203}, {0, 1, 2, 202, 203}}) {
      const auto slices = static_cast<int64_t>(cuts.size()) - 1;
      Buffer part_ids = Buffer(DType::i32, {slices, n, k}).fill(-7), parts(DType::f32, {slices, n, k});
      for (int64_t s = 0; s < slices; ++s) {
        const int64_t at = s * n * k;
        top_columns(
            e, {.logits = logits.tensor().columns(cuts[s], cuts[s + 1] - cuts[s]),
                .ids = make_tensor(static_cast<int32_t*>(part_ids.tensor().data) + at, DType::i32, {n, k}),
                .values = make_tensor(static_cast<float*>(parts.tensor().data) + at, DType::f32, {n, k}),
                .first_column = cuts[s]});
      }
      Buffer ids(DType::i32, {n, k}), got(DType::f32, {n, k});
      top_columns(e, {.part_ids = part_ids, .part_values = parts, .ids = ids, .values = got});
      synchronize(e);
      expect(ids.values() == want_ids.values(), fmt::format("ids of {} slices, k {}", slices, k));
      expect(same_bits(got, want), fmt::format("numbers of {} slices, k {}", slices, k));
    }
  }
}

}  // namespace

NRL_OP_CASES(distillation) {
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const auto& [n, v, k] : {Shape{1, 1, 1}, {5, 203, 9}, {4, 64, 64}, {3, 40, 50}, {2, 9000, 333}})
      registry.tests.push_back(
          {fmt::format("top_columns.{} ({}, {}) k {}", name_of(dtype), n, v, k),
           [=](Exec& e) -> Outputs {
             const Buffer x = numbers_to_select(dtype, n, v);
             Buffer ids = Buffer(DType::i32, {n, k}).fill(-7), values = Buffer(DType::f32, {n, k}).fill(9);
             top_columns(e, {.logits = x, .ids = ids, .values = values, .first_column = 13});
             return {{"ids", ids}, {"values", values}};
           },
           true});
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const auto& [n, v, k] : {Shape{1, 1, 1}, {7, 203, 9}, {33, 64, 64}, {300, 40, 3}})
      for (const int64_t first : {0, 13})
        registry.tests.push_back(
            {fmt::format("gather_columns.{} ({}, {}) k {} from {}", name_of(dtype), n, v, k, first),
             [=](Exec& e) -> Outputs {
               const Buffer logits = Buffer(dtype, {n, v}, 3).normal("logits");
               Buffer out = Buffer(DType::f32, {n, k}).fill(9);
               const Buffer ids = distinct_ids(n, k, v);
               gather_columns(e, {.logits = logits, .ids = ids, .out = out, .first_column = first});
               return {{"out", out}};
             },
             true});
  for (const Options& o : all_options)
    for (const auto& [n, v, k] : {Shape{1, 2, 1}, {7, 203, 9}, {33, 130, 64}, {300, 40, 3}, {3, 400, 200}})
      registry.tests.push_back({fmt::format("topk_kl.{} ({}, {}) k {}", name_of_options(o), n, v, k),
                                [=](Exec& e) -> Outputs {
                                  Problem p(DType::f32, DType::f32, n, v, k, o, {0, v});
                                  p.gradient.fill(9), p.rest.fill(9);
                                  p.forward(Dispatch{e}, true);
                                  Outputs out{{"score", p.score, k}, {"gradient", p.gradient, k}};
                                  if (o.zero_outside) out.push_back({"rest", p.rest, k});
                                  return out;
                                },
                                true});
  for (const DType logits : {DType::f32, DType::bf16})
    for (const DType out : {DType::f32, DType::bf16, DType::f16})
      for (const bool rest : {false, true})
        for (const auto& [n, v, k] : {Shape{1, 1, 1}, {7, 203, 9}, {5, 1032, 8}}) {
          if (logits == DType::bf16 && out != logits) continue;
          registry.tests.push_back(
              {fmt::format("scatter_columns.{} to {} ({}, {}) k {}{}", name_of(logits), name_of(out), n, v, k,
                           rest ? " rest" : ""),
               [=](Exec& e) -> Outputs {
                 Buffer x = Buffer(logits, {n, v}, v % 8 == 0 ? 8 : 3).normal("logits", 2.0),
                        d = Buffer(out, {n, v}, v % 8 == 0 ? 8 : 3).fill(9);
                 const Buffer ids = distinct_ids(n, k, v), g = Buffer(DType::f32, {n, k}).normal("gradient"),
                              lse = Buffer(DType::f32, {n}).normal("lse", 1.0, 5.0);
                 Buffer r = Buffer(DType::f32, {n, 2}).normal("rest");
                 if (n > 1) r.set(2, 0), r.set(3, 0);
                 ScatterColumns a{
                     .logits = x, .ids = ids, .gradient = g, .first_column = 3, .inverse_temperature = 0.5f};
                 if (rest) a.rest = r, a.lse = lse;
                 if (out != logits) a.dlogits = d;
                 scatter_columns(e, a);
                 return {{"dlogits", out != logits ? d : x, 16}};
               },
               true});
        }
  registry.properties.push_back({"top_columns in slices", same_in_slices});
  registry.properties.push_back({"topk_kl follows its definition", follows_definition});
  registry.properties.push_back({"topk_kl of all ids", all_ids_are_the_vocabulary});
  registry.properties.push_back({"topk_kl of equal distributions", equal_distributions});
  registry.properties.push_back({"topk_kl of padding", padding_and_excluded_tokens});
  registry.properties.push_back({"scatter_columns to any place", same_everywhere});
  registry.properties.push_back({"topk_kl by other calls", equivalent_calls});
  for (const Options& o : all_options)
    registry.grads.push_back({"topk_kl " + name_of_options(o), [o](DType t) { return gradient(t, o); }});
}

}  // namespace nrl::ops_test
