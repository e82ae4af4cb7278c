// cross_entropy() with a temperature and entropies, and the gradient from its results.

#include <cmath>
#include <optional>

#include "core/ops/cross_entropy.h"
#include "core/ops/transfer.h"
#include "tests/ops/cases.h"
#include "tests/ops/gradient_place.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;

/// Logits with targets and weights, and the results of the forward pass. Rows 1 to 3 of more than three are
/// special: no target, a weight of 0, both weights 0.
struct Problem {
  Buffer logits, target, weight, entropy_weight, log_prob, lse, entropy, loss_scale;
  float t = 1;
  bool with_entropy = false;
  /// The columns in slices, each with its own statistics; empty: the whole.
  std::vector<int64_t> cuts = {};
  Buffer statistics = {};

  Problem(int64_t n, int64_t v, DType logits_dtype, DType dtype, int64_t gap, double scale, float t_,
          bool with_entropy_, std::vector<int64_t> cuts_ = {})
      : logits(Buffer(logits_dtype, {n, v}, gap).normal("logits", scale)),
        target(Buffer(DType::i32, {n}).integers("target", 0, v)),
        weight(Buffer(dtype, {n}).normal("weight")),
        entropy_weight(Buffer(dtype, {n}).normal("entropy weight")),
        log_prob(dtype, {n}),
        lse(dtype, {n}),
        entropy(dtype, {n}),
        loss_scale(Buffer(DType::f64, {1}).fill(8)),
        t(t_),
        with_entropy(with_entropy_),
        cuts(std::move(cuts_)) {
    target.set(0, static_cast<double>(v - 1));  // after the last vector
    if (!cuts.empty()) statistics = Buffer(dtype, {std::ssize(cuts) - 1, n, with_entropy ? 4 : 3});
    if (n <= 3) return;
    target.set(1, -1);
    weight.set(2, 0.0);
    weight.set(3, 0.0);
    entropy_weight.set(3, 0.0);
    target.set(2, 0);
  }

  int64_t rows() const { return logits.tensor().dim(0); }
  /// Calls body(first column, a slice of the logits) for every slice.
  template <class Body>
  void for_slices(const Buffer& of, const Body& body) const {
    if (cuts.empty()) return body(int64_t{0}, of.tensor());
    for (size_t s = 0; s + 1 < cuts.size(); ++s)
      body(cuts[s], of.tensor().columns(cuts[s], cuts[s + 1] - cuts[s]));
  }

  /// `call` calls an op: through its wrapper, or a kernel with tensors that the wrapper refuses.
  template <class Call>
  void forward(const Call& call, const Buffer& of) {
    const Tensor all = statistics;
    const int64_t slice = cuts.empty() ? 0 : all.stride[0] * size_of(all.dtype);
    int64_t s = 0;
    if (!cuts.empty())
      for_slices(of, [&](int64_t first, const Tensor& part) {
        Tensor out =
            make_tensor(static_cast<std::byte*>(all.data) + slice * s++, all.dtype, {all.dim(1), all.dim(2)});
        call(CrossEntropyStatistics{
            .logits = part, .target = target, .first_column = first, .out = out, .inverse_temperature = t});
      });
    // Every slice gives the same results.
    for_slices(of, [&](int64_t first, const Tensor& part) {
      call(CrossEntropy{.logits = part,
                        .target = target,
                        .log_prob = log_prob,
                        .lse = lse,
                        .entropy = with_entropy ? entropy.tensor() : Tensor{},
                        .inverse_temperature = t,
                        .first_column = first,
                        .statistics = all});
    });
  }
  CrossEntropyGradient gradient(const Tensor& part, int64_t first, bool scaled) const {
    return {.logits = part,
            .target = target,
            .lse = lse,
            .weight = weight,
            .entropy = with_entropy ? entropy.tensor() : Tensor{},
            .entropy_weight = with_entropy ? entropy_weight.tensor() : Tensor{},
            .loss_scale = scaled ? loss_scale.tensor() : Tensor{},
            .first_column = first,
            .inverse_temperature = t};
  }
};

/// Calls the wrapper of an op.
auto wrapper(Exec& e) {
  return [&e]<class Arguments>(const Arguments& a) {
    if constexpr (std::is_same_v<Arguments, CrossEntropy>)
      cross_entropy(e, a);
    else
      cross_entropy_statistics(e, a);
  };
}

/// Log-probabilities and entropies, then the gradient in `place`.
Outputs gradient_of(Exec& e, Problem p, Place place, DType rounded = DType::bf16, int64_t gap = 0) {
  const int64_t v = p.logits.tensor().dim(1);
  p.forward(wrapper(e), p.logits);
  const PlacedGradient placed(p.logits, place, rounded, gap);
  p.for_slices(p.logits, [&](int64_t first, const Tensor& part) {
    CrossEntropyGradient a = p.gradient(part, first, true);
    if (const Tensor all = placed.dlogits()) a.dlogits = all.columns(first, part.dim(1));
    cross_entropy_gradient(e, a);
  });
  synchronize(e);
  Outputs outputs{{"log_prob", p.log_prob, v}, {"lse", p.lse, v}, {"entropy", p.entropy, v}};
  if (!p.cuts.empty()) outputs.push_back({"statistics", p.statistics, v});
  outputs.push_back(placed.output());
  return outputs;
}

/// Gradient of sum(weight log_prob + entropy_weight entropy).
GradProblem grad_problem(DType dtype, float t, bool with_entropy, std::vector<int64_t> cuts) {
  auto p = std::make_shared<Problem>(6, 13, dtype, dtype, 0, 2.0, t, with_entropy, std::move(cuts));
  auto work = std::make_shared<Buffer>(p->logits);
  const auto kernels = [](Exec& e) {
    return [&e]<class Arguments>(const Arguments& a) {
      if constexpr (std::is_same_v<Arguments, CrossEntropy>)
        e.kernels->cross_entropy(e, a);
      else
        e.kernels->cross_entropy_statistics(e, a);
    };
  };
  GradProblem g;
  g.inputs = {&p->logits};
  g.gradients = {work.get()};
  g.reduction_length = 13;
  g.loss = [p, kernels](Exec& e) {
    p->forward(kernels(e), p->logits);
    return dot(p->log_prob, p->weight) + (p->with_entropy ? dot(p->entropy, p->entropy_weight) : 0.0);
  };
  g.backward = [p, kernels, work](Exec& e) {
    *work = p->logits;
    p->forward(kernels(e), *work);
    p->for_slices(*work, [&](int64_t first, const Tensor& part) {
      e.kernels->cross_entropy_gradient(e, p->gradient(part, first, false));
    });
  };
  return g;
}

/// The gradient in one pass and from lse are the same to the rounding of lse and of one multiplication, and
/// the error of the exponential, whose argument differs. A 16-bit gradient may be rounded to its neighbor.
void same_as_fused(Exec& e) {
  struct Type {
    DType logits, gradient;
    double unit;
  };
  constexpr int64_t n = 9, v = 9001;
  for (const auto [logits, gradient, unit] :
       {Type{DType::f32, DType::f32, 0x1p-22}, Type{DType::bf16, DType::bf16, 0x1p-7},
        Type{DType::f32, DType::bf16, 0x1p-7}, Type{DType::f32, DType::f16, 0x1p-10}})
    for (const double scale : {1.0, 10.0}) {
      const Place place = logits == gradient ? Place::over_logits : Place::front_half;
      Problem fused(n, v, logits, DType::f32, 0, scale, 1, false), parts = fused;
      const PlacedGradient one(fused.logits, place, gradient, 0), two(parts.logits, place, gradient, 0);
      cross_entropy(e, {.logits = fused.logits,
                        .target = fused.target,
                        .weight = fused.weight,
                        .loss_scale = fused.loss_scale,
                        .log_prob = fused.log_prob,
                        .lse = fused.lse,
                        .dlogits = one.dlogits()});
      parts.forward(wrapper(e), parts.logits);
      CrossEntropyGradient a = parts.gradient(parts.logits, 0, true);
      a.dlogits = two.dlogits();
      cross_entropy_gradient(e, a);
      synchronize(e);
      const Buffer got = two.output().value, want = one.output().value;
      for (int64_t i = 0; i < n * v; ++i) {
        const int64_t r = i / v;
        const double off = std::fabs(got.get(i) - want.get(i)),
                     lse = std::fabs(parts.lse.get(r)) + std::fabs(parts.lse.get(r) - parts.log_prob.get(r)),
                     weight = std::fabs(8 * parts.weight.get(r));
        const double relative = unit + 0x1p-23 * lse + 2 * exp_tolerance(e);
        // At the target the probability is subtracted from 1.
        const bool target = i % v == static_cast<int64_t>(parts.target.get(r));
        const double size = target ? weight : std::fabs(want.get(i));
        expect(off <= relative * size + 0x1p-24,
               fmt::format("{} of {} logits: {} at row {}, in one pass {}", name_of(gradient),
                           name_of(logits), got.get(i), r, want.get(i)));
      }
    }
}

/// Entropies at their limits: log(V) of equal logits, at any temperature; 0 of a certain token.
void limits_of_entropy(Exec& e) {
  constexpr int64_t v = 4099;
  Buffer logits = Buffer(DType::f32, {2, v}).fill(-3), log_prob(DType::f32, {2}), entropy(DType::f32, {2});
  const Buffer target = Buffer(DType::i32, {2}).fill(5);
  logits.set(v + 5, 500);
  cross_entropy(e, {.logits = logits,
                    .target = target,
                    .log_prob = log_prob,
                    .entropy = entropy,
                    .inverse_temperature = 0.7f});
  synchronize(e);
  expect(std::fabs(entropy.get(0) - std::log(v)) < 1e-5 && std::fabs(entropy.get(1)) < 1e-9,
         fmt::format("entropies {} and {}", entropy.get(0), entropy.get(1)));
}

/// An excluded token (-infinity) adds nothing to entropies and gradients; what is not a number reaches them.
void non_finite(Exec& e) {
  constexpr int64_t v = 600;
  for (const std::vector<int64_t>& cuts : {std::vector<int64_t>{}, {0, v / 2, v}})
    for (const DType dtype : {DType::f32, DType::bf16}) {
      Problem p(2, v, dtype, DType::f32, 0, 1.0, 0.7f, true, cuts);
      p.target.fill(3);
      for (int64_t i = 8; i < v; ++i) p.logits.set(i, -INFINITY);
      p.logits.set(v + 400, NAN);
      const Outputs out = gradient_of(e, p, Place::over_logits);
      const Buffer &log_prob = out.front().value, &entropy = out[2].value, &gradient = out.back().value;
      double sum = 0;
      for (int64_t i = 0; i < v; ++i) sum += gradient.get(i);
      expect(std::isfinite(log_prob.get(0)) && entropy.get(0) > 0 && entropy.get(0) <= std::log(8.0) &&
                 std::fabs(sum) < (dtype == DType::f32 ? 1e-5 + 100 * exp_tolerance(e) : 0.2) &&
                 gradient.get(v - 1) == 0,
             "excluded tokens count");
      expect(std::isnan(log_prob.get(1)) && std::isnan(entropy.get(1)) && std::isnan(gradient.get(v)),
             "a NaN is lost");
    }
}

}  // namespace

NRL_OP_CASES(cross_entropy_gradient) {
  const auto add = [&](const std::string& what, Place place, DType rounded, int64_t gap,
                       std::function<Problem()> make) {
    const bool over = place == Place::over_logits;
    registry.tests.push_back({fmt::format("cross_entropy_gradient {} {}{}", what, name_of(place),
                                          over ? "" : fmt::format(" in {}", name_of(rounded))),
                              [=](Exec& e) { return gradient_of(e, make(), place, rounded, gap); }, true});
  };
  struct Shape {
    int64_t n, v, gap;
  };
  for (const auto [n, v, gap] :
       {Shape{1, 1, 0}, {4, 3, 1}, {5, 64, 0}, {7, 50, 1}, {5, 2053, 0}, {4, 16384, 8}, {4, 40003, 2}})
    for (const bool entropy : {false, true}) {
      const float t = entropy && v > 1 ? 0.7f : 1.0f;  // the zeros of a single token are exact
      const std::string what = fmt::format("({}, {}) gap {}{}", n, v, gap, entropy ? " entropy" : "");
      const auto problem = [=](DType dtype) {
        return [=] { return Problem(n, v, dtype, DType::f32, gap, 3.0, t, entropy); };
      };
      add(what + " bf16", Place::over_logits, DType::bf16, gap, problem(DType::bf16));
      add(what, Place::over_logits, DType::bf16, gap, problem(DType::f32));
      for (const Place place : {Place::apart, Place::front_half})
        for (const DType rounded : {DType::bf16, DType::f16})
          add(what, place, rounded, gap, problem(DType::f32));
    }
  // The size of a real vocabulary; likely and unlikely tokens; other combinations of temperature and entropy.
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const auto& [v, scale] : {std::pair<int64_t, double>{151936, 2.0}, {257, 30.0}, {257, 0.1}})
      for (const bool entropy : {false, true})
        add(fmt::format("({}, {}) {} scale {}{}", 4, v, name_of(dtype), scale, entropy ? " entropy" : ""),
            Place::over_logits, DType::bf16, 3,
            [=] { return Problem(4, v, dtype, DType::f32, 3, scale, entropy ? 1.0f : 1.6f, entropy); });
  const std::vector<int64_t> divisions[] = {{0, 1, 2}, {0, 17, 34, 50}, {0, 2053, 4106}, {0, 8001, 40003}};
  for (const std::vector<int64_t>& cuts : divisions)
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const bool entropy : {false, true})
        for (const Place place : {Place::over_logits, Place::apart}) {
          if (place == Place::apart && dtype != DType::f32) continue;
          add(fmt::format("{} of {} in {} slices{}", name_of(dtype), cuts.back(), cuts.size() - 1,
                          entropy ? " entropy" : ""),
              place, DType::bf16, 1,
              [=] { return Problem(5, cuts.back(), dtype, DType::f32, 1, 3.0, 0.7f, entropy, cuts); });
        }
  registry.properties.push_back({"cross_entropy_gradient.same_as_fused", same_as_fused});
  registry.properties.push_back({"cross_entropy_gradient.limits_of_entropy", limits_of_entropy});
  registry.properties.push_back({"cross_entropy_gradient.non_finite", non_finite});
  for (const float t : {1.0f, 0.7f})
    for (const bool entropy : {false, true})
      for (const std::vector<int64_t>& cuts : {std::vector<int64_t>{}, {0, 4, 5, 13}})
        registry.grads.push_back({fmt::format("cross_entropy_gradient t {}{}{}", t, entropy ? " entropy" : "",
                                              cuts.empty() ? "" : " of slices"),
                                  [=](DType dtype) { return grad_problem(dtype, t, entropy, cuts); }});
}

}  // namespace nrl::ops_test
