#include "core/ops/qk_norm_rope.h"
#include "core/ops/rope.h"
#include "tests/ops/cases.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;

struct Shape {
  int64_t n, heads, kv_heads, d;
  int64_t rotary;  ///< 0: no table
  /// Elements behind the heads of q and k of a token, as v in a fused projection.
  int64_t gap;
  bool norm = true;
  int64_t all() const { return heads + kv_heads; }
  float weight_offset() const { return norm && heads % 2 == 1 ? 0.75f : 0.0f; }
  std::string name() const {
    return fmt::format("({}, {} + {}, {}) gap {} rotary {}{}", n, heads, kv_heads, d, gap, rotary,
                       norm ? "" : " without norm");
  }
};

Buffer table_of(DType t, int64_t rotary) {
  const std::vector<float> values = rope_table({.rotary_dim = rotary}, 40, 40);
  Buffer table(t, {40, rotary});
  for (int64_t i = 0; i < table.size(); ++i) table.set(i, static_cast<double>(values[i]));
  return table;
}

/// Everything that both directions read and write.
struct Problem {
  Shape s;
  Buffer x, out, dout, dx, q_weight, k_weight, rstd, table, positions, dq_weight, dk_weight;

  Problem(const Shape& shape, DType t, DType weight, DType exact = DType::f32) : s(shape) {
    x = Buffer(t, {s.n, s.all(), s.d}, s.gap).normal("x");
    dout = Buffer(t, {s.n, s.all(), s.d}, s.gap).normal("dout");
    out = Buffer(t, {s.n, s.all(), s.d}, s.gap);
    dx = Buffer(t, {s.n, s.all(), s.d}, s.gap);
    if (s.norm) {
      q_weight = Buffer(weight, {s.d}).normal("q", 0.3, 1.0);
      k_weight = Buffer(weight, {s.d}).normal("k", 0.3, 1.0);
      rstd = Buffer(exact, {s.n * s.all()});
      dq_weight = Buffer(exact, {s.d}).normal("dq");
      dk_weight = Buffer(exact, {s.d}).normal("dk");
    }
    if (s.rotary) {
      table = table_of(exact, s.rotary);
      positions = Buffer(DType::i32, {s.n}).integers("positions", 0, 40);
    }
  }
  QkNormRopeForward forward() {
    if (!s.norm) out = x;  // in place
    return {.x = s.norm ? x : out,
            .out = out,
            .heads = s.heads,
            .q_weight = q_weight,
            .k_weight = k_weight,
            .weight_offset = s.weight_offset(),
            .rstd = rstd,
            .table = table,
            .positions = positions};
  }
  QkNormRopeBackward backward() {
    dx = dout;
    return {.dout = dx,
            .x = x,
            .dx = dx,
            .heads = s.heads,
            .q_weight = q_weight,
            .k_weight = k_weight,
            .rstd = rstd,
            .table = table,
            .positions = positions,
            .weight_offset = s.weight_offset(),
            .dq_weight = dq_weight,
            .dk_weight = dk_weight};
  }
};

Outputs forward(Exec& e, const Shape& s, DType t, DType weight) {
  Problem p(s, t, weight);
  qk_norm_rope_forward(e, p.forward());
  Outputs outputs{{"out", p.out, s.d}};
  if (s.norm) outputs.push_back({"rstd", p.rstd, s.d});
  return outputs;
}

Outputs backward(Exec& e, const Shape& s, DType t, DType weight, bool weights) {
  Problem p(s, t, weight);
  if (s.norm) p.rstd.normal("rstd", 0.1, 1.0);
  QkNormRopeBackward a = p.backward();
  if (!weights) a.dq_weight = a.dk_weight = {};
  qk_norm_rope_backward(e, a);
  Outputs outputs{{"dx", p.dx, s.d}};
  if (s.norm) {
    outputs.push_back({"dq_weight", p.dq_weight, s.n * s.heads});
    outputs.push_back({"dk_weight", p.dk_weight, s.n * s.kv_heads});
  }
  return outputs;
}

GradProblem gradient(DType t, const Shape& s) {
  auto p = std::make_shared<Problem>(s, t, t, t);
  GradProblem g;
  g.keep = p;
  g.reduction_length = std::max(s.d, s.n * s.heads);
  g.inputs = {&p->x, &p->q_weight, &p->k_weight};
  g.gradients = {&p->dx, &p->dq_weight, &p->dk_weight};
  g.loss = [p](Exec& e) {
    e.kernels->qk_norm_rope_forward(e, p->forward());
    return dot(p->out, p->dout);
  };
  g.backward = [p](Exec& e) {
    p->dq_weight.fill(0);
    p->dk_weight.fill(0);
    e.kernels->qk_norm_rope_backward(e, p->backward());
  };
  return g;
}

}  // namespace

NRL_OP_CASES(qk) {
  const std::vector<Shape> shapes = {{1, 1, 1, 2, 2, 0},         // the smallest
                                     {5, 3, 2, 31, 14, 7},       // nothing is even
                                     {7, 4, 2, 64, 64, 128},     // as in a fused projection
                                     {7, 4, 2, 64, 64, 3},       // rows at odd places
                                     {33, 5, 1, 128, 128, 128},  // one kv head; heads that are no whole tasks
                                     {4, 9, 3, 64, 32, 192},     // a part turns
                                     {3, 2, 1, 48, 16, 0},       // slots that are no power of two
                                     {6, 8, 2, 32, 0, 64},       // no rotation
                                     {2, 3, 3, 256, 64, 0},      //
                                     {2, 2, 1, 520, 512, 0},     // longer than a warp's packs
                                     {9, 4, 2, 64, 48, 16, false}, {3, 2, 1, 15, 6, 0, false},
                                     {2, 2, 1, 16, 0, 0, false}};
  for (const Shape& s : shapes) {
    for (DType t : {DType::f32, DType::bf16, DType::f16}) {
      for (DType weight : {DType::f32, DType::bf16, DType::f16}) {
        if (weight != t && (!s.norm || weight == DType::f16 || t == DType::f16)) continue;
        const std::string name = fmt::format("qk.{}.{} {}", name_of(t), name_of(weight), s.name());
        registry.tests.push_back(
            {name + " forward", [=](Exec& e) { return forward(e, s, t, weight); }, true});
        for (bool weights : {false, true})
          registry.tests.push_back({name + (weights ? " backward" : " backward dx"),
                                    [=](Exec& e) { return backward(e, s, t, weight, weights); }});
      }
    }
  }
  for (const Shape& s : {Shape{70, 5, 1, 256, 64, 0}, {30, 4, 2, 16, 16, 0}, {40, 3, 1, 9, 4, 0}}) {
    for (DType t : {DType::f32, DType::bf16, DType::f16}) {
      const std::string name = fmt::format("qk.{} {} few blocks", name_of(t), s.name());
      registry.tests.push_back({name + " forward", [=](Exec& e) {
                                  Exec few = few_blocks(e);
                                  return forward(few, s, t, t);
                                }});
      registry.tests.push_back({name + " backward", [=](Exec& e) {
                                  Exec few = few_blocks(e);
                                  return backward(few, s, t, t, true);
                                }});
    }
  }
  for (const Shape& s : {Shape{2, 2, 1, 8, 4, 3}, {2, 3, 2, 16, 16, 0}, {2, 2, 1, 7, 0, 1}})
    registry.grads.push_back({"qk " + s.name(), [=](DType t) { return gradient(t, s); }});
}

}  // namespace nrl::ops_test
