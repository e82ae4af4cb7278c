#include <limits>

#include "core/ops/grouped_linear.h"
#include "core/ops/transfer.h"
#include "tests/ops/cases.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;

struct Setup {
  std::vector<int64_t> rows;  ///< of each expert
  int64_t m, k, gap = 0, unused = 0;
  /// A GPU has one block for all tiles, where its kernel walks over them; only in 16 bits.
  bool one_block = false;
};

struct Problem {
  Buffer x, weight, dout, offsets, out, dx, dweight;
  int64_t largest = 0;
  Problem(const Setup& s, DType t, DType weight_gradient = DType::f32) {
    const auto experts = static_cast<int64_t>(s.rows.size());
    offsets = Buffer(DType::i32, {experts + 1});
    int64_t n = 0;
    for (int64_t e = 0; e < experts; ++e) {
      n += s.rows[e];
      largest = std::max(largest, s.rows[e]);
      offsets.set(e + 1, static_cast<double>(n));
    }
    const int64_t used = n;
    n += s.unused;
    x = Buffer(t, {n, s.k}, s.gap).normal("x");
    dout = Buffer(t, {n, s.m}, s.gap).normal("dout");
    // Rows of no expert may hold anything.
    for (int64_t i = used * s.k; i < n * s.k; ++i) x.set(i, std::numeric_limits<double>::quiet_NaN());
    for (int64_t i = used * s.m; i < n * s.m; ++i) dout.set(i, std::numeric_limits<double>::quiet_NaN());
    weight = Buffer(t, {experts * s.m, s.k}).normal("weight");
    out = Buffer(t, {n, s.m}, s.gap).fill(3);
    dx = Buffer(t, {n, s.k}, s.gap).fill(3);
    dweight = Buffer(weight_gradient, {experts * s.m, s.k}).normal("dweight");
  }
};

/// exec with exactly the workspace that the op asked for.
struct ExactWorkspace {
  ExactWorkspace(Exec e, const Problem& p, const Setup& s, DType t) : exec(e) {
    if (e.libraries) return;
    memory.resize(
        grouped_linear_workspace(p.x.tensor().dim(0), s.m, s.k, t, e.threads, e.kernels->bf16_products));
    exec.workspace = {memory.data(), memory.size()};
  }
  std::vector<std::byte> memory;
  Exec exec;
};

Outputs all(Exec& e, const Setup& s, DType t, bool accumulate) {
  Problem p(s, t);
  ExactWorkspace exact(s.one_block ? few_blocks(e) : e, p, s, t);
  grouped_linear_forward(exact.exec, {.x = p.x, .weight = p.weight, .offsets = p.offsets, .out = p.out});
  grouped_linear_backward_data(exact.exec,
                               {.dout = p.dout, .weight = p.weight, .offsets = p.offsets, .dx = p.dx});
  grouped_linear_backward_weight(
      exact.exec,
      {.dout = p.dout, .x = p.x, .offsets = p.offsets, .dweight = p.dweight, .accumulate = accumulate});
  synchronize(exact.exec);
  return {{"out", p.out, s.k}, {"dx", p.dx, s.m}, {"dweight", p.dweight, p.largest}};
}

GradProblem gradient(DType t) {
  const Setup s{.rows = {2, 0, 3}, .m = 3, .k = 4};
  auto p = std::make_shared<Problem>(s, t, t);
  GradProblem g;
  g.inputs = {&p->x, &p->weight};
  g.gradients = {&p->dx, &p->dweight};
  g.reduction_length = 4;
  g.loss = [p](Exec& e) {
    e.kernels->grouped_linear_forward(e,
                                      {.x = p->x, .weight = p->weight, .offsets = p->offsets, .out = p->out});
    return dot(p->out, p->dout);
  };
  g.backward = [p](Exec& e) {
    e.kernels->grouped_linear_backward_data(
        e, {.dout = p->dout, .weight = p->weight, .offsets = p->offsets, .dx = p->dx});
    e.kernels->grouped_linear_backward_weight(
        e, {.dout = p->dout, .x = p->x, .offsets = p->offsets, .dweight = p->dweight, .accumulate = false});
  };
  return g;
}

}  // namespace

NRL_OP_CASES(grouped_linear) {
  std::vector<int64_t> many(70, 1);
  many[3] = 40;
  many[64] = 0;
  const Setup setups[] = {{{1}, 1, 1},
                          {{3, 0, 5}, 7, 9, 1},
                          {{0, 17, 0, 4, 0}, 40, 24, 0, 3},
                          {{130, 1, 66}, 72, 136, 8, 5},
                          {many, 16, 32},
                          {{20, 30}, 136, 1100},
                          {{0, 0}, 8, 8, 0, 4},
                          {many, 16, 32, 0, 1, true},
                          {{130, 0, 45, 64}, 200, 392, 8, 70, true},
                          {{2100, 30}, 200, 8, 0, 0, true}};
  int index = 0;
  for (const Setup& s : setups) {
    for (const DType t : {DType::f32, DType::bf16, DType::f16}) {
      if (s.one_block && t == DType::f32) continue;
      for (const bool accumulate : {false, true})
        registry.tests.push_back({fmt::format("grouped_linear.{} {} ({}, {}) gap {}{}", index, name_of(t),
                                              s.m, s.k, s.gap, accumulate ? " accumulate" : ""),
                                  [=](Exec& e) { return all(e, s, t, accumulate); }});
    }
    ++index;
  }
  registry.grads.push_back({"grouped_linear", gradient});
}

}  // namespace nrl::ops_test
