#include <cmath>

#include "core/ops/router.h"
#include "core/ops/step.h"
#include "core/ops/transfer.h"
#include "tests/ops/cases.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;

struct Setup {
  const char* name;
  int64_t n, experts, segments = 1;
  RouterRule rule;
  bool bias = false;
};

const Setup setups[] = {{"one expert", 3, 1, 1, {.top_k = 1}},
                        {"mixtral", 17, 8, 1, {.top_k = 2, .normalize = true}},
                        {"qwen2_moe", 12, 60, 3, {.top_k = 4}},
                        {"qwen3_moe", 66, 128, 2, {.top_k = 8, .normalize = true}},
                        {"wide", 5, 1024, 5, {.top_k = 32, .scale = 0.5f}},
                        {"sigmoid", 9, 33, 3, {.top_k = 3, .score = RouterScore::sigmoid}, true},
                        {"deepseek_v3",
                         10,
                         64,
                         2,
                         {.top_k = 8,
                          .score = RouterScore::sigmoid,
                          .normalize = true,
                          .scale = 2.5f,
                          .groups = 8,
                          .group_top_k = 4},
                         true},
                        {"softmax groups", 21, 48, 7, {.top_k = 5, .groups = 6, .group_top_k = 3}}};

struct Router {
  Buffer logits, bias, expert, prob, counts, dprob, dlogits;
  explicit Router(const Setup& s, DType t = DType::f32, double scale = 2.0) {
    const int64_t k = s.rule.top_k;
    logits = Buffer(t, {s.n, s.experts}).normal("logits", scale);
    bias = Buffer(DType::f32, {s.experts}).normal("bias", 0.3);
    expert = Buffer(DType::i32, {s.n, k});
    prob = Buffer(t, {s.n, k});
    counts = Buffer(DType::i32, {s.segments, s.experts});
    dprob = Buffer(t, {s.n, k}).normal("dprob");
    dlogits = Buffer(t, {s.n, s.experts});
  }
};

RouterForward forward_of(const Setup& s, const Router& r) {
  return {.rule = s.rule,
          .logits = r.logits,
          .bias = s.bias ? r.bias.tensor() : Tensor{},
          .expert = r.expert,
          .prob = r.prob};
}

Outputs forward(Exec& e, const Setup& s) {
  Router r(s);
  router_forward(e, forward_of(s, r));
  router_counts(e, {.expert = r.expert, .segment = s.n / s.segments, .counts = r.counts});
  synchronize(e);
  return {{"expert", r.expert}, {"prob", r.prob, s.experts}, {"counts", r.counts}};
}

Outputs balance(Exec& e, const Setup& s) {
  Router r(s);
  std::vector<std::byte> memory(e.libraries ? 0 : router_workspace(e.partials()));
  Exec exact = e;
  if (!e.libraries) exact.workspace = {memory.data(), memory.size()};
  Buffer metrics = Buffer(DType::f64, {3}).fill(1.5);
  router_forward(exact, forward_of(s, r));
  router_counts(exact, {.expert = r.expert, .segment = s.n / s.segments, .counts = r.counts});
  router_balance(
      exact, {.rule = s.rule, .logits = r.logits, .counts = r.counts, .share = 0.25f, .metrics = metrics});
  synchronize(exact);
  Buffer rounded(DType::f32, {3});
  for (int64_t i = 0; i < 3; ++i) rounded.set(i, metrics.get(i));
  return {{"metrics", rounded, s.experts}};
}

/// The z loss and the load, added one after the other.
Outputs late_load(Exec& e, const Setup& s) {
  Router r(s);
  std::vector<std::byte> memory(e.libraries ? 0 : router_workspace(e.partials()));
  Exec exact = e;
  if (!e.libraries) exact.workspace = {memory.data(), memory.size()};
  Buffer metrics = Buffer(DType::f64, {3}).fill(1.5);
  router_forward(exact, forward_of(s, r));
  router_counts(exact, {.expert = r.expert, .segment = s.n / s.segments, .counts = r.counts});
  router_balance(exact,
                 {.rule = s.rule, .logits = r.logits, .counts = {}, .share = 0.25f, .metrics = metrics});
  router_balance(exact, {.rule = s.rule,
                         .logits = make_tensor(nullptr, DType::f32, {0, s.experts}),
                         .counts = r.counts,
                         .share = 0.25f,
                         .metrics = metrics});
  synchronize(exact);
  Buffer rounded(DType::f32, {3});
  for (int64_t i = 0; i < 3; ++i) rounded.set(i, metrics.get(i));
  expect(metrics.get(0) == 1.5, fmt::format("aux loss {}", metrics.get(0) - 1.5));
  return {{"metrics", rounded, s.experts}};
}

Outputs backward(Exec& e, const Setup& s, float aux, float z, DType out) {
  Router r(s);
  Buffer dlogits(out, {s.n, s.experts});
  router_forward(e, forward_of(s, r));
  router_counts(e, {.expert = r.expert, .segment = s.n / s.segments, .counts = r.counts});
  router_backward(e, {.rule = s.rule,
                      .logits = r.logits,
                      .expert = r.expert,
                      .dprob = r.dprob,
                      .counts = aux != 0 ? r.counts.tensor() : Tensor{},
                      .aux = aux,
                      .z = z,
                      .dlogits = dlogits});
  synchronize(e);
  return {{"dlogits", dlogits, 4 * s.experts}};
}

/// The loss is dprob . prob + aux * (aux loss) + z * (z loss).
GradProblem gradient(DType t, const Setup& s, float aux, float z) {
  auto r = std::make_shared<Router>(s, t, 1.0);
  GradProblem g;
  g.inputs = {&r->logits};
  g.gradients = {&r->dlogits};
  g.reduction_length = 4 * s.experts;
  g.loss = [=](Exec& e) {
    e.kernels->router_forward(e, forward_of(s, *r));
    e.kernels->router_counts(e, {.expert = r->expert, .segment = s.n / s.segments, .counts = r->counts});
    Buffer metrics(DType::f64, {3});
    e.kernels->router_balance(e, {.rule = s.rule,
                                  .logits = r->logits,
                                  .counts = r->counts,
                                  .segment = s.n / s.segments,
                                  .total = s.n,
                                  .metrics = metrics});
    return dot(r->prob, r->dprob) + static_cast<double>(aux) * metrics.get(0) +
           static_cast<double>(z) * metrics.get(1);
  };
  g.backward = [=](Exec& e) {
    e.kernels->router_forward(e, forward_of(s, *r));
    e.kernels->router_counts(e, {.expert = r->expert, .segment = s.n / s.segments, .counts = r->counts});
    e.kernels->router_backward(e, {.rule = s.rule,
                                   .logits = r->logits,
                                   .expert = r->expert,
                                   .dprob = r->dprob,
                                   .counts = r->counts,
                                   .segment = s.n / s.segments,
                                   .total = s.n,
                                   .aux = aux,
                                   .z = z,
                                   .dlogits = r->dlogits});
  };
  return g;
}

/// Of equal scores the lower expert wins, in every row; with a bias, the biased one.
void ties(Exec& e) {
  for (const RouterScore score : {RouterScore::softmax, RouterScore::sigmoid}) {
    constexpr int64_t n = 5, experts = 40, k = 3;
    const RouterRule rule{.top_k = k, .score = score, .groups = 4, .group_top_k = 2};
    Buffer logits(DType::f32, {n, experts}), expert(DType::i32, {n, k}), prob(DType::f32, {n, k});
    Buffer bias(DType::f32, {experts});
    router_forward(e, {.rule = rule, .logits = logits, .expert = expert, .prob = prob});
    synchronize(e);
    for (int64_t i = 0; i < n * k; ++i)
      expect(expert.get(i) == static_cast<double>(i % k), "equal scores do not choose the first experts");
    bias.set(33, 1);  // group 3, which with group 0 is chosen then
    router_forward(e, {.rule = rule, .logits = logits, .bias = bias, .expert = expert, .prob = prob});
    synchronize(e);
    expect(expert.get(0) == 33 && expert.get(1) == 0 && expert.get(2) == 1, "the bias does not choose");
    expect(std::fabs(prob.get(0) - (score == RouterScore::softmax ? 1.0 / experts : 0.5)) < 1e-6,
           "the bias changes the weight");
  }
}

/// Ranks with parts of the tokens, which sum their counts, have the losses and gradients of one with all.
void parts(Exec& e) {
  const Setup s{"parts", 12, 5, 3, {.top_k = 2, .score = RouterScore::sigmoid, .normalize = true}};
  Router all(s);
  std::vector<std::byte> memory(e.libraries ? 0 : router_workspace(e.partials()));
  Exec exact = e;
  if (!e.libraries) exact.workspace = {memory.data(), memory.size()};
  const auto run = [&](const RouterBalance& balance, const RouterBackward& backward) {
    router_balance(exact, balance);
    router_backward(exact, backward);
  };
  router_forward(exact, forward_of(s, all));
  Buffer sum(DType::i32, {s.experts}), metrics(DType::f64, {3});
  router_counts(exact, {.expert = all.expert, .segment = 4, .counts = all.counts, .sum = sum});
  const auto balance_of = [&](const Router& r, Buffer& out) {
    return RouterBalance{.rule = s.rule, .logits = r.logits, .counts = all.counts, .metrics = out};
  };
  const auto backward_of = [&](const Router& r) {
    return RouterBackward{.rule = s.rule,
                          .logits = r.logits,
                          .expert = r.expert,
                          .dprob = r.dprob,
                          .counts = all.counts,
                          .aux = 2,
                          .z = 0.5f,
                          .dlogits = r.dlogits};
  };
  run(balance_of(all, metrics), backward_of(all));
  synchronize(exact);
  Buffer total(DType::f64, {3}), counted(DType::i32, {s.segments, s.experts});
  std::vector<double> step(static_cast<size_t>(s.experts));
  int64_t first = 0;
  for (const int64_t n : {5, 1, 6}) {  // segments of 4 are cut
    Setup part = s;
    part.n = n;
    Router r(part);
    for (int64_t i = 0; i < n * s.experts; ++i) r.logits.set(i, all.logits.get(first * s.experts + i));
    for (int64_t i = 0; i < n * 2; ++i) r.dprob.set(i, all.dprob.get(first * 2 + i));
    router_forward(exact, forward_of(part, r));
    Buffer own(DType::i32, {s.experts});
    router_counts(exact, {.expert = r.expert, .segment = 4, .first = first, .counts = r.counts, .sum = own});
    RouterBalance balance = balance_of(r, total);
    balance.first = first, balance.segment = 4, balance.total = s.n, balance.load = first == 0;
    RouterBackward backward = backward_of(r);
    backward.first = first, backward.segment = 4, backward.total = s.n;
    run(balance, backward);
    synchronize(exact);
    for (int64_t i = 0; i < s.segments * s.experts; ++i) counted.set(i, counted.get(i) + r.counts.get(i));
    for (int64_t i = 0; i < s.experts; ++i) step[i] += own.get(i);
    for (int64_t i = 0; i < n * s.experts; ++i)
      expect(std::fabs(r.dlogits.get(i) - all.dlogits.get(first * s.experts + i)) < 1e-6,
             fmt::format("dlogits {} of token {}", i % s.experts, first + i / s.experts));
    first += n;
  }
  for (int64_t i = 0; i < s.segments * s.experts; ++i)
    expect(counted.get(i) == all.counts.get(i), "counts of segments");
  for (int64_t i = 0; i < s.experts; ++i) expect(step[i] == sum.get(i), "counts of all segments");
  for (int i = 0; i < 3; ++i)
    expect(std::fabs(total.get(i) - metrics.get(i)) < 1e-6,
           fmt::format("metric {}: {} and {}", i, total.get(i), metrics.get(i)));
}

/// Experts below the mean are raised, those above it lowered, others and skipped steps left alone.
void moved_bias(Exec& e) {
  Buffer counts(DType::i32, {4}), scalars(DType::f64, {StepScalar::count}), bias(DType::f32, {4});
  const double given[] = {3, 5, 0, 4};
  for (int64_t i = 0; i < 4; ++i) counts.set(i, given[i]);  // mean 3
  for (int64_t i = 0; i < 4; ++i) bias.set(i, 0.5);
  const RouterBias call{.counts = counts, .scalars = scalars, .rate = 0.25f, .bias = bias};
  router_bias(e, call);
  synchronize(e);
  const double wanted[] = {0.5, 0.25, 0.75, 0.25};
  for (int64_t i = 0; i < 4; ++i)
    expect(bias.get(i) == wanted[i], fmt::format("bias {}: {}", i, bias.get(i)));
  scalars.set(StepScalar::skip, 1);
  router_bias(e, call);
  synchronize(e);
  for (int64_t i = 0; i < 4; ++i) expect(bias.get(i) == wanted[i], "a skipped step moved the bias");
}

/// Balanced tokens give the aux loss 1 for any E and k, and the load 1.
void balanced(Exec& e) {
  constexpr int64_t n = 12, experts = 6;
  for (const RouterScore score : {RouterScore::softmax, RouterScore::sigmoid}) {
    Buffer logits(DType::f32, {n, experts}), expert(DType::i32, {n, 1}), prob(DType::f32, {n, 1});
    Buffer counts(DType::i32, {2, experts}), metrics(DType::f64, {3});
    for (int64_t t = 0; t < n; ++t) logits.set(t * experts + t % experts, 2.0);
    const RouterRule rule{.top_k = 1, .score = score};
    router_forward(e, {.rule = rule, .logits = logits, .expert = expert, .prob = prob});
    router_counts(e, {.expert = expert, .segment = n / 2, .counts = counts});
    router_balance(e, {.rule = rule, .logits = logits, .counts = counts, .metrics = metrics});
    synchronize(e);
    const double lse = std::log(5 + std::exp(2.0));
    expect(std::fabs(metrics.get(0) - 1) < 1e-6 && std::fabs(metrics.get(1) - lse * lse) < 1e-5 &&
               metrics.get(2) == 1,
           fmt::format("aux {}, z {}, load {}", metrics.get(0), metrics.get(1), metrics.get(2)));
  }
}

void refused(Exec&) {
  const auto wrong = [](const RouterRule& rule, int64_t experts) {
    return unsupported(rule, experts)[0] != 0;
  };
  expect(wrong({.top_k = 9}, 8) && wrong({.top_k = 0}, 8) && wrong({.top_k = 1}, 1025), "sizes");
  expect(wrong({.top_k = 2, .groups = 3}, 8) && wrong({.top_k = 2, .groups = 4, .group_top_k = 5}, 8) &&
             wrong({.top_k = 3, .groups = 4, .group_top_k = 1}, 8),
         "groups");
  expect(!wrong({.top_k = 2, .groups = 4, .group_top_k = 1}, 8), "groups of two");
}

}  // namespace

NRL_OP_CASES(router) {
  for (const Setup& s : setups) {
    registry.tests.push_back(
        {fmt::format("router.{} forward", s.name), [=](Exec& e) { return forward(e, s); }, true});
    registry.tests.push_back(
        {fmt::format("router.{} balance", s.name), [=](Exec& e) { return balance(e, s); }, true});
    registry.tests.push_back(
        {fmt::format("router.{} late load", s.name), [=](Exec& e) { return late_load(e, s); }, true});
    for (const DType t : {DType::f32, DType::bf16, DType::f16})
      for (const auto& [aux, z] : {std::pair{0.0f, 0.0f}, {0.7f, 0.0f}, {0.0f, 0.3f}, {3.0f, 2.0f}})
        registry.tests.push_back(
            {fmt::format("router.{} backward {} aux {} z {}", s.name, name_of(t), aux, z),
             [=](Exec& e) { return backward(e, s, aux, z, t); }, true});
    if (s.experts > 100) continue;
    registry.grads.push_back(
        {fmt::format("router.{}", s.name), [=](DType t) { return gradient(t, s, 0, 0); }});
    registry.grads.push_back(
        {fmt::format("router.{} with losses", s.name), [=](DType t) { return gradient(t, s, 1.5f, 0.5f); }});
  }
  registry.properties.push_back({"router.ties", ties});
  registry.properties.push_back({"router.balanced", balanced});
  registry.properties.push_back({"router.parts", parts});
  registry.properties.push_back({"router.moved bias", moved_bias});
  registry.properties.push_back({"router.refused", refused});
}

}  // namespace nrl::ops_test
