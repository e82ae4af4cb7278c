#include <algorithm>
#include <cmath>

#include "core/base/philox.h"
#include "core/ops/embedding.h"
#include "core/ops/transfer.h"
#include "tests/ops/cases.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;

struct Problem {
  Buffer ids, positions, table, places, out, dout, dtable, dplaces;
};

GradProblem gradient(DType t) {
  auto p = std::make_shared<Problem>();
  p->ids = Buffer(DType::i32, {9}).integers("ids", 0, 5);
  p->positions = Buffer(DType::i32, {9}).integers("positions", 0, 3);
  p->table = Buffer(t, {5, 4}).normal("table");
  p->places = Buffer(t, {3, 4}).normal("places");
  p->out = Buffer(t, {9, 4});
  p->dout = Buffer(t, {9, 4}).normal("dout");
  p->dtable = Buffer(t, {5, 4});
  p->dplaces = Buffer(t, {3, 4});
  GradProblem g;
  g.inputs = {&p->table, &p->places};
  g.gradients = {&p->dtable, &p->dplaces};
  g.reduction_length = 9;
  g.loss = [p](Exec& e) {
    e.kernels->embedding_forward(e, {.ids = p->ids,
                                     .table = p->table,
                                     .position_table = p->places,
                                     .positions = p->positions,
                                     .out = p->out,
                                     .scale = 1.5f});
    return dot(p->out, p->dout);
  };
  g.backward = [p](Exec& e) {
    e.kernels->embedding_backward(e, {.ids = p->ids,
                                      .dout = p->dout,
                                      .dtable = p->dtable,
                                      .positions = p->positions,
                                      .dposition_table = p->dplaces,
                                      .scale = 1.5f});
  };
  return g;
}

enum class Ids : uint8_t { spread, one_hot_token, all_the_same, descending, distinct };

Buffer ids_of(Ids kind, int64_t n, int64_t vocabulary) {
  Buffer ids = Buffer(DType::i32, {n}).integers("ids", 0, vocabulary);
  const PhiloxStream random(7, "hot");
  for (int64_t i = 0; i < n; ++i) {
    if (kind == Ids::one_hot_token && random.uniform(static_cast<uint64_t>(i)) < 0.3f)
      ids.set(i, static_cast<double>(vocabulary / 2));
    if (kind == Ids::all_the_same) ids.set(i, static_cast<double>(vocabulary - 1));
    if (kind == Ids::descending) ids.set(i, static_cast<double>((n - 1 - i) * vocabulary / n));
    if (kind == Ids::distinct) ids.set(i, static_cast<double>(i * 7919 % vocabulary));
  }
  return ids;
}

/// Runs of one id of all lengths, ids of several digits, with no byte more of workspace than asked for.
Outputs runs(Exec& e, Ids kind, DType dtype, int64_t n, int64_t vocabulary, int64_t h, int64_t gap) {
  const Buffer ids = ids_of(kind, n, vocabulary), dout = Buffer(dtype, {n, h}, gap).normal("dout");
  Buffer dtable(DType::f32, {vocabulary, h}, gap);
  for (int64_t r = 0; r < std::min<int64_t>(vocabulary, 50); ++r)
    for (int64_t i = 0; i < h; ++i) dtable.set(r * h + i, static_cast<double>(r - i));
  Exec exact = e;
  const size_t bytes = embedding_backward_workspace(n, h);
  exact.workspace.size = std::min(bytes, e.workspace.size);
  embedding_backward(exact, {.ids = ids, .dout = dout, .dtable = dtable, .scale = gap > 0 ? 0.5f : 1.0f});
  return {{"dtable", dtable, n}};
}

/// The slices of a table, each with its own rows: together they are the whole.
struct Sliced {
  int64_t n, vocabulary, h;
  std::vector<int64_t> cuts;
  bool positions;
};

Outputs sliced_forward(Exec& e, const Sliced& s, DType dtype) {
  const Buffer ids = Buffer(DType::i32, {s.n}).integers("ids", 0, s.vocabulary),
               where = Buffer(DType::i32, {s.n}).integers("positions", 0, 5),
               table = Buffer(dtype, {s.vocabulary, s.h}, 3).normal("table"),
               places = Buffer(dtype, {5, s.h}).normal("places");
  Outputs outputs;
  for (size_t i = 0; i + 1 < s.cuts.size(); ++i) {
    Buffer out = Buffer(dtype, {s.n, s.h}).fill(7);
    EmbeddingForward a{.ids = ids,
                       .table = table.tensor().rows(s.cuts[i], s.cuts[i + 1] - s.cuts[i]),
                       .out = out,
                       .first_id = s.cuts[i],
                       .scale = s.positions ? 2.0f : 1.0f};
    if (s.positions && i == 0) a.position_table = places, a.positions = where;
    embedding_forward(e, a);
    synchronize(e);
    outputs.push_back({fmt::format("slice {}", i), out});
  }
  return outputs;
}

Outputs sliced_backward(Exec& e, const Sliced& s, DType dtype) {
  const Buffer ids = ids_of(Ids::one_hot_token, s.n, s.vocabulary),
               where = Buffer(DType::i32, {s.n}).integers("positions", 0, 5),
               dout = Buffer(dtype, {s.n, s.h}).normal("dout");
  Buffer dtable = Buffer(DType::f32, {s.vocabulary, s.h}).normal("dtable"), dplaces(DType::f32, {5, s.h});
  for (size_t i = 0; i + 1 < s.cuts.size(); ++i) {
    EmbeddingBackward a{.ids = ids,
                        .dout = dout,
                        .dtable = dtable.tensor().rows(s.cuts[i], s.cuts[i + 1] - s.cuts[i]),
                        .first_id = s.cuts[i],
                        .scale = s.positions ? 2.0f : 1.0f};
    if (s.positions && i == 0) a.dposition_table = dplaces, a.positions = where;
    embedding_backward(e, a);
  }
  return {{"dtable", dtable, s.n}, {"dplaces", dplaces, s.n}};
}

/// Added up, the slices give the rows of the whole table; its gradient has the same bits.
void slices_are_the_whole(Exec& e) {
  const Sliced s{.n = 700, .vocabulary = 1100, .h = 8, .cuts = {0, 512, 513, 1100}, .positions = true};
  const Sliced one{.n = 700, .vocabulary = 1100, .h = 8, .cuts = {0, 1100}, .positions = true};
  const Outputs parts = sliced_forward(e, s, DType::f32), whole = sliced_forward(e, one, DType::f32);
  for (int64_t i = 0; i < whole[0].value.size(); ++i) {
    double sum = 0;
    for (const Output& part : parts) sum += part.value.get(i);
    expect(std::fabs(sum - whole[0].value.get(i)) < 1e-6, "the slices do not add up");
  }
  const Outputs gradients = sliced_backward(e, s, DType::f32), all = sliced_backward(e, one, DType::f32);
  for (int64_t i = 0; i < all[0].value.size(); ++i)
    expect(std::fabs(gradients[0].value.get(i) - all[0].value.get(i)) <
               1e-5 * (1 + std::fabs(all[0].value.get(i))),
           "the gradient of a slice differs");
}

}  // namespace

NRL_OP_CASES(embedding) {
  struct Case {
    Ids kind;
    int64_t n, vocabulary, h, gap;
  };
  for (const Case& c : {Case{Ids::spread, 1100, 600, 8, 0},
                        {Ids::spread, 513, 70000, 4, 4},
                        {Ids::spread, 70, 262200, 4, 0},
                        {Ids::one_hot_token, 1100, 1000, 12, 0},
                        {Ids::one_hot_token, 300, 11, 5, 0},
                        {Ids::all_the_same, 1030, 513, 4, 8},
                        {Ids::all_the_same, 32, 1, 520, 0},
                        {Ids::descending, 640, 20, 8, 0},
                        {Ids::descending, 65, 3, 136, 8},
                        {Ids::distinct, 600, 1000, 4, 0},
                        {Ids::distinct, 33, 40, 7, 1}})
    for (DType dtype : {DType::f32, DType::bf16, DType::f16})
      registry.tests.push_back(
          {fmt::format("embedding.{} ({}, {}) of {} ids {} gap {} backward", name_of(dtype), c.n, c.h,
                       c.vocabulary, static_cast<int>(c.kind), c.gap),
           [=](Exec& e) { return runs(e, c.kind, dtype, c.n, c.vocabulary, c.h, c.gap); }, true});

  constexpr int64_t vocabulary = 37, places = 11;
  for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (auto [n, h] : {std::pair<int64_t, int64_t>{1, 1}, {7, 31}, {64, 61}, {301, 257}, {19, 1040}}) {
      for (bool positions : {false, true}) {
        const std::string name =
            fmt::format("embedding.{} ({}, {}) {}", name_of(dtype), n, h, positions ? "with positions" : "");
        auto ids = [=] { return Buffer(DType::i32, {n}).integers("ids", 0, vocabulary); };
        auto where = [=] { return Buffer(DType::i32, {n}).integers("positions", 0, places); };
        for (DType out_type : {DType::f32, DType::bf16, DType::f16}) {
          if ((out_type == DType::f16) != (dtype == DType::f16)) continue;
          registry.tests.push_back({name + " forward to " + std::string(name_of(out_type)),
                                    [=](Exec& e) -> Outputs {
                                      const Buffer i = ids(), w = where();
                                      const Buffer table = Buffer(dtype, {vocabulary, h}, 3).normal("table");
                                      const Buffer place = Buffer(dtype, {places, h}).normal("places");
                                      Buffer out(out_type, {n, h}, 2);
                                      EmbeddingForward a{.ids = i, .table = table, .out = out};
                                      if (positions) {
                                        a.position_table = place;
                                        a.positions = w;
                                        a.scale = 3;
                                      }
                                      embedding_forward(e, a);
                                      return {{"out", out}};
                                    },
                                    true});
        }
        registry.tests.push_back({name + " backward",
                                  [=](Exec& e) -> Outputs {
                                    const Buffer i = ids(), w = where();
                                    const Buffer dout = Buffer(dtype, {n, h}, 3).normal("dout");
                                    Buffer dtable = Buffer(DType::f32, {vocabulary, h}).normal("dtable");
                                    Buffer dplaces = Buffer(DType::f32, {places, h}).normal("dplaces");
                                    EmbeddingBackward a{.ids = i, .dout = dout, .dtable = dtable};
                                    if (positions) {
                                      a.positions = w;
                                      a.dposition_table = dplaces;
                                      a.scale = 3;
                                    }
                                    embedding_backward(e, a);
                                    return {{"dtable", dtable, n}, {"dplaces", dplaces, n}};
                                  },
                                  true});
      }
    }
  }
  for (const Sliced& s :
       {Sliced{9, 5, 4, {0, 2, 5}, true}, Sliced{1100, 600, 8, {0, 512, 600}, false},
        Sliced{513, 1030, 5, {0, 1, 6, 518, 1030}, true}, Sliced{40, 70000, 12, {0, 35000, 70000}, false}})
    for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      const std::string name = fmt::format("embedding.{} ({}, {}) of {} ids in {} slices", name_of(dtype),
                                           s.n, s.h, s.vocabulary, s.cuts.size() - 1);
      registry.tests.push_back({name, [=](Exec& e) { return sliced_forward(e, s, dtype); }, true});
      registry.tests.push_back(
          {name + " backward", [=](Exec& e) { return sliced_backward(e, s, dtype); }, true});
    }
  registry.properties.push_back({"embedding.slices_are_the_whole", slices_are_the_whole});
  registry.grads.push_back({"embedding", gradient});
}

}  // namespace nrl::ops_test
