#include "core/ops/cross_entropy/cross_entropy.h"

#include "tests/ops/cases.h"

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

}  // namespace

NRL_OP_CASES(cross_entropy) {
  for (auto [n, v] : {std::pair<int64_t, int64_t>{1, 1}, {7, 31}, {61, 257}, {3, 5001}, {5, 32003}}) {
    for (double scale : {1.0, 30.0}) {
      for (bool weighted : {false, true}) {
        for (bool with_lse : {false, true}) {
          registry.tests.push_back(
              {fmt::format("cross_entropy ({}, {}) scale {} {}{}", n, v, scale,
                           weighted ? "gradient" : "forward", with_lse ? " lse" : ""),
               [=](Exec& e) -> Outputs {
                 Buffer logits = Buffer(DType::f32, {n, v}, 3).normal("logits", scale);
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
  for (auto [n, v] : {std::pair<int64_t, int64_t>{1024, 32000}, {256, 128256}}) {
    for (bool weighted : {false, true}) {
      // The gradient reads and writes each logit once as far as memory is concerned, if a row stays in the
      // cache.
      registry.perfs.push_back(
          {fmt::format("cross_entropy.{} ({}, {})", weighted ? "gradient" : "forward", n, v), [=] {
             auto p = std::make_shared<Problem>();
             p->logits = Buffer(DType::f32, {n, v});
             p->target = Buffer(DType::i32, {n}).integers("target", 0, v);
             p->weight = Buffer(DType::f32, {n}).fill(1e-6);
             p->log_prob = Buffer(DType::f32, {n});
             return PerfProblem{[=](Exec& e) {
                                  CrossEntropy a{
                                      .logits = p->logits, .target = p->target, .log_prob = p->log_prob};
                                  if (weighted) a.weight = p->weight;
                                  cross_entropy(e, a);
                                },
                                static_cast<double>(p->logits.tensor().bytes() * (weighted ? 2 : 1))};
           }});
    }
  }
}

}  // namespace nrl::ops_test
