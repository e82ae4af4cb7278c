#include <cmath>
#include <limits>

#include "core/ops/attention.h"
#include "core/ops/merge.h"
#include "tests/ops/cases.h"
#include "tests/ops/reference/table.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;

constexpr double none = -std::numeric_limits<double>::infinity();

struct MergeShape {
  int64_t n, heads, d, gap;
};

Outputs merged(Exec& e, DType dtype, const MergeShape& s) {
  Buffer part(dtype, {s.n, s.heads * s.d}, s.gap), out(DType::f32, {s.n, s.heads * s.d}, s.gap);
  Buffer part_lse = Buffer(DType::f32, {s.heads, s.n}, 1).normal("part lse", 3.0, 1.0);
  Buffer lse = Buffer(DType::f32, {s.heads, s.n}).normal("lse", 3.0, 1.0);
  part.normal("part");
  out.normal("out");
  // No key in the part, in what there is so far, in both; and a part that counts for nothing beside the rest.
  const auto set = [&](int64_t row, double old_value, double new_value) {
    if (row >= s.n) return;
    lse.set(row, old_value);
    part_lse.set(row, new_value);
  };
  set(1, 2.0, none);
  set(2, none, -3.0);
  set(3, none, none);
  set(4, 300.0, -300.0);
  merge_attention(e, {.part = part.tensor().split_heads(s.heads, s.d),
                      .part_lse = part_lse,
                      .out = out.tensor().split_heads(s.heads, s.d),
                      .lse = lse});
  return {{"out", out, 2}, {"lse", lse, 2}};
}

/// Attention over all keys is what merging attention over two parts of them gives.
void parts_are_the_whole(Exec& e) {
  const int64_t queries = 37, keys = 90, split = 50, heads = 4, kv_heads = 2, d = 24;
  const Buffer q = Buffer(DType::f32, {queries, heads, d}).normal("q"),
               k = Buffer(DType::f32, {keys, kv_heads, d}).normal("k"),
               v = Buffer(DType::f32, {keys, kv_heads, d}).normal("v");
  Exec reference{.kernels = &reference_kernels()};
  const auto attend = [&](int64_t begin, int64_t end, Buffer& out, Buffer& lse) {
    Buffer cu_q(DType::i32, {2}), cu_k(DType::i32, {2});
    cu_q.set(1, static_cast<double>(queries));
    cu_k.set(1, static_cast<double>(end - begin));
    attention_forward(reference, {.q = q,
                                  .k = k.tensor().rows(begin, end - begin),
                                  .v = v.tensor().rows(begin, end - begin),
                                  .out = out,
                                  .lse = lse,
                                  .cu_q = cu_q,
                                  .cu_k = cu_k,
                                  .scale = 0.3f,
                                  .causal = false});
  };
  const auto results = [&] {
    return std::pair(Buffer(DType::f32, {queries, heads, d}), Buffer(DType::f32, {heads, queries}));
  };
  auto [want, want_lse] = results();
  auto [out, lse] = results();
  auto [part, part_lse] = results();
  attend(0, keys, want, want_lse);
  attend(0, split, out, lse);
  attend(split, keys, part, part_lse);
  merge_attention(e, {.part = part, .part_lse = part_lse, .out = out, .lse = lse});
  expect(error_of(out, want) < 1e-6 + exp_tolerance(e), "out of the parts is not out of the whole");
  expect(error_of(lse, want_lse) < 1e-6 + exp_tolerance(e), "lse of the parts is not lse of the whole");
}

}  // namespace

NRL_OP_CASES(merge) {
  for (const DType x_type : {DType::f32, DType::bf16, DType::f16})
    for (const DType out_type : {DType::f32, DType::bf16, DType::f16})
      for (const auto& [n, width, gap] : {std::tuple<int64_t, int64_t, int64_t>{1, 1, 0},
                                          {7, 31, 3},
                                          {5, 64, 8},
                                          {3, 1024, 0},
                                          {90, 24, 5}})
        for (const bool accumulate : {false, true})
          registry.tests.push_back({fmt::format("add_rows.{} to {} ({}, {}) gap {}{}", name_of(x_type),
                                                name_of(out_type), n, width, gap, accumulate ? " added" : ""),
                                    [=](Exec& e) -> Outputs {
                                      const Buffer x = Buffer(x_type, {n, width}, gap).normal("x");
                                      Buffer out = Buffer(out_type, {n, width}, gap).normal("out");
                                      add_rows(e, {.x = x, .out = out, .accumulate = accumulate});
                                      return {{"out", out}};
                                    },
                                    true});
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const MergeShape& s :
         {MergeShape{1, 1, 1, 0}, {6, 2, 33, 3}, {70, 3, 64, 8}, {9, 1, 16, 0}, {33, 4, 8, 0}})
      registry.tests.push_back(
          {fmt::format("merge_attention.{} ({}, {}, {}) gap {}", name_of(dtype), s.n, s.heads, s.d, s.gap),
           [=](Exec& e) { return merged(e, dtype, s); }, true});
  registry.properties.push_back({"merge_attention of parts", parts_are_the_whole});
}

}  // namespace nrl::ops_test
