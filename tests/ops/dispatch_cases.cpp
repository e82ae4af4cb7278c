#include <algorithm>
#include <array>

#include "core/ops/dispatch.h"
#include "core/ops/transfer.h"
#include "tests/ops/cases.h"
#include "tests/ops/reference/table.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;

struct Setup {
  int64_t n, k, experts, capacity = 0;
  bool pad = false, by_prob = false;
  int64_t first = 0;  ///< only these experts, of which a token may choose fewer
  int64_t rows() const { return pad ? experts * capacity : n * std::min(k, experts); }
};

struct Sorted {
  Buffer expert, prob, offsets, row, source;
  explicit Sorted(const Setup& s, DType prob_type = DType::f32)
      : expert(s.first == 0 ? Buffer(DType::i32, {s.n, s.k}).integers("expert", 0, s.experts)
                            : Buffer(DType::i32, {s.n, s.k})),
        prob(Buffer(prob_type, {s.n, s.k}).normal("prob", 0.2, 0.5)),
        offsets(DType::i32, {s.experts + 1}),
        row(DType::i32, {s.n, s.k}),
        source(DType::i32, {s.rows()}) {
    // Different experts of each token, before, among and behind those of the sort.
    for (int64_t i = 0; s.first > 0 && i < expert.size(); ++i)
      expert.set(i, static_cast<double>((i / s.k * 5 + i % s.k * 3) % (s.first + s.experts + 4)));
    // Experts without tokens, and equal probabilities.
    for (int64_t i = 0; i < expert.size(); ++i) {
      if (s.experts > 2 && expert.get(i) == 1) expert.set(i, 0);
      if (i % 5 == 0) prob.set(i, 0.5);
    }
  }
  DispatchSort arguments(const Setup& s) const {
    return {.expert = expert,
            .first = s.first,
            .prob = s.by_prob ? prob.tensor() : Tensor{},
            .capacity = s.capacity,
            .pad = s.pad,
            .offsets = offsets,
            .row = row,
            .source = source};
  }
};

Outputs sort(Exec& e, const Setup& s) {
  const Sorted t(s);
  dispatch_sort(e, t.arguments(s));
  synchronize(e);
  return {{"offsets", t.offsets}, {"row", t.row}, {"source", t.source}};
}

Outputs moved(Exec& e, const Setup& s, DType t, int64_t h, int64_t gap) {
  const Sorted sorted(s);
  dispatch_sort(e, sorted.arguments(s));
  const Buffer x = Buffer(t, {s.n, h}, gap).normal("x"), y = Buffer(t, {s.rows(), h}, gap).normal("y");
  Buffer permuted(t, {s.rows(), h}, gap), out(t, {s.n, h}, gap), plain(t, {s.n, h}, 2 * gap);
  Buffer added = Buffer(t, {s.n, h}, gap).normal("added");
  permute(e, {.x = x, .source = sorted.source, .top_k = s.k, .out = permuted});
  unpermute(e, {.x = y, .row = sorted.row, .prob = sorted.prob, .out = out});
  unpermute(e, {.x = y, .row = sorted.row, .out = plain});
  unpermute(e, {.x = y, .row = sorted.row, .prob = sorted.prob, .addend = added, .out = added});
  synchronize(e);
  return {{"permuted", permuted}, {"out", out, s.k}, {"plain", plain, s.k}, {"added", added, s.k}};
}

Outputs gate(Exec& e, const Setup& s, DType t, int64_t f, int64_t gap, bool in_place) {
  const Sorted sorted(s);
  dispatch_sort(e, sorted.arguments(s));
  Buffer dact = Buffer(t, {s.rows(), f}, gap).normal("dact"),
         act = Buffer(t, {s.rows(), f}, gap).normal("act");
  Buffer dprob(DType::f32, {s.n, s.k}), dact_out = dact, act_out = act;
  gate_backward(e, {.dact = dact,
                    .act = act,
                    .prob = sorted.prob,
                    .row = sorted.row,
                    .dprob = dprob,
                    .dact_out = in_place ? dact : dact_out,
                    .act_out = in_place ? act : act_out});
  synchronize(e);
  return {{"dprob", dprob, f}, {"dact", in_place ? dact : dact_out}, {"act", in_place ? act : act_out}};
}

/// loss = sum over tokens of out . dout, where out = sum of prob * (act W^T) with W = 1 (F = H): what
/// Unpermute computes forward and GateBackward with Permute backward.
GradProblem gradient(DType t, const Setup& s) {
  struct Problem : Sorted {
    Problem(const Setup& s, DType t) : Sorted(s, t) {}
    Buffer act, dout, out, dact, act_out, dprob, dact_out;
  };
  auto p = std::make_shared<Problem>(s, t);
  constexpr int64_t h = 5;
  p->act = Buffer(t, {s.rows(), h}).normal("act");
  p->act_out = p->dact = p->dact_out = Buffer(t, {s.rows(), h});
  p->dout = Buffer(t, {s.n, h}).normal("dout");
  p->out = Buffer(t, {s.n, h});
  p->dprob = Buffer(t, {s.n, s.k});
  reference_kernels().dispatch_sort(*std::make_unique<Exec>(), p->arguments(s));
  GradProblem g;
  g.inputs = {&p->act, &p->prob};
  g.gradients = {&p->dact_out, &p->dprob};
  g.reduction_length = h;
  g.loss = [p](Exec& e) {
    e.kernels->unpermute(e, {.x = p->act, .row = p->row, .prob = p->prob, .out = p->out});
    return dot(p->out, p->dout);
  };
  g.backward = [p, s](Exec& e) {
    e.kernels->permute(e, {.x = p->dout, .source = p->source, .top_k = s.k, .out = p->dact});
    e.kernels->gate_backward(e, {.dact = p->dact,
                                 .act = p->act,
                                 .prob = p->prob,
                                 .row = p->row,
                                 .dprob = p->dprob,
                                 .dact_out = p->dact_out,
                                 .act_out = p->act_out});
  };
  return g;
}

/// Without row: an MLP behind a gate, whose rows are the tokens.
Outputs in_place_rows(Exec& e, DType t, int64_t n, int64_t f) {
  const Buffer x = Buffer(t, {n, f}).normal("x"), prob = Buffer(DType::f32, {n, 1}).normal("prob");
  Buffer out(t, {n, f}), dact = Buffer(t, {n, f}).normal("dact"), act = Buffer(t, {n, f}).normal("act"),
                         dprob(DType::f32, {n, 1});
  unpermute(e, {.x = x, .prob = prob, .out = out});
  gate_backward(e,
                {.dact = dact, .act = act, .prob = prob, .dprob = dprob, .dact_out = dact, .act_out = act});
  synchronize(e);
  return {{"out", out}, {"dprob", dprob, f}, {"dact", dact}, {"act", act}};
}

/// Groups of 0 to 6 rows, placed in reverse order; back to where they were.
Outputs regrouped(Exec& e, DType t, int64_t groups, int64_t h, int64_t gap) {
  Buffer begin(DType::i32, {groups + 1}), place(DType::i32, {groups});
  const auto count = [](int64_t g) { return static_cast<double>((g * 5 + 3) % 7); };
  for (int64_t g = 0; g < groups; ++g) begin.set(g + 1, begin.get(g) + count(g));
  const auto rows = static_cast<int64_t>(begin.get(groups));
  for (int64_t g = 0; g < groups; ++g) place.set(g, static_cast<double>(rows) - begin.get(g + 1));
  const Buffer x = Buffer(t, {rows, h}, gap).normal("x");
  Buffer placed(t, {rows, h}, 2 * gap), back(t, {rows, h}, gap);
  regroup_rows(e, {.x = x, .begin = begin, .place = place, .out = placed});
  regroup_rows(e, {.x = placed, .begin = begin, .place = place, .placed_in = true, .out = back});
  synchronize(e);
  for (int64_t i = 0; i < rows; ++i) expect(back.get(i * h) == x.get(i * h), "rows do not come back");
  return {{"placed", placed}, {"back", back}};
}

/// An entry of no expert is dropped everywhere.
void outside(Exec& e) {
  Setup s{.n = 40, .k = 2, .experts = 3};
  Sorted t(s);
  t.expert.set(0, -1);
  t.expert.set(79, 3);
  dispatch_sort(e, t.arguments(s));
  synchronize(e);
  expect(t.row.get(0) == -1 && t.row.get(79) == -1 && t.offsets.get(3) == 78 && t.source.get(78) == -1 &&
             t.source.get(79) == -1,
         "entries of no expert are dispatched");
}

}  // namespace

NRL_OP_CASES(dispatch) {
  const Setup setups[] = {{1, 1, 1},
                          {7, 2, 3},
                          {300, 4, 9},
                          {257, 8, 128},
                          {30, 2, 4, 10},
                          {300, 2, 5, 90, true},
                          {300, 2, 5, 110, false, true},
                          {40, 3, 7, 12, true, true},
                          {20, 2, 3, 100, true, true},
                          {.n = 300, .k = 2, .experts = 5, .first = 4},
                          {.n = 120, .k = 8, .experts = 3, .first = 4},
                          {.n = 90, .k = 2, .experts = 4, .capacity = 9, .first = 6}};
  const std::array types{DType::f32, DType::bf16, DType::f16};
  for (const Setup& s : setups) {
    const std::string name = fmt::format("dispatch ({} x {} to {}) capacity {}{}{}", s.n, s.k, s.experts,
                                         s.capacity, s.pad ? " padded" : "", s.by_prob ? " by prob" : "") +
                             (s.first > 0 ? fmt::format(" from {}", s.first) : "");
    registry.tests.push_back({name + " sort", [=](Exec& e) { return sort(e, s); }, true});
    const auto place = &s - setups;
    for (const DType t : types)
      for (const auto& [h, gap] : {std::pair<int64_t, int64_t>{1, 0}, {33, 1}, {64, 8}, {1040, 0}}) {
        // Every type with a few tokens and with many experts; else in turn.
        if (s.n > 7 && s.experts < 128 && t != types[place % 3]) continue;
        registry.tests.push_back({fmt::format("{} {} rows of {} gap {}", name, name_of(t), h, gap),
                                  [=](Exec& e) { return moved(e, s, t, h, gap); }, true});
        for (const bool in_place : {false, true})
          registry.tests.push_back({fmt::format("{} {} gate of {} gap {}{}", name, name_of(t), h, gap,
                                                in_place ? " in place" : ""),
                                    [=](Exec& e) { return gate(e, s, t, h, gap, in_place); }, true});
      }
  }
  // More entries than a block of the GPU looks at at a time.
  for (const Setup& s : {Setup{3000, 4, 9}, {2600, 4, 9, 900}, {2600, 4, 9, 900, false, true}})
    registry.tests.push_back({fmt::format("dispatch ({} x {} to {}) capacity {}{} sort", s.n, s.k, s.experts,
                                          s.capacity, s.by_prob ? " by prob" : ""),
                              [=](Exec& e) { return sort(e, s); }, true});
  // More choices than the GPU keeps in registers.
  for (const DType t : types)
    registry.tests.push_back({fmt::format("dispatch.{} rows of 11 choices", name_of(t)),
                              [=](Exec& e) {
                                return moved(e, {40, 11, 16}, t, 72, 0);
                              },
                              true});
  for (const DType t : types)
    registry.tests.push_back({fmt::format("dispatch.{} without rows", name_of(t)),
                              [=](Exec& e) { return in_place_rows(e, t, 37, 72); }, true});
  for (const DType t : types)
    for (const auto& [groups, h, gap] :
         {std::tuple<int64_t, int64_t, int64_t>{1, 3, 0}, {2, 1, 0}, {9, 33, 1}, {40, 64, 8}, {300, 1040, 0}})
      registry.tests.push_back(
          {fmt::format("dispatch.{} {} groups of rows of {} gap {}", name_of(t), groups, h, gap),
           [=](Exec& e) { return regrouped(e, t, groups, h, gap); }, true});
  registry.grads.push_back({"dispatch", [](DType t) { return gradient(t, {.n = 5, .k = 2, .experts = 3}); }});
  registry.properties.push_back({"dispatch.outside", outside});
}

}  // namespace nrl::ops_test
