#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/ops/attention.h"
#include "core/ops/paged.h"
#include "core/ops/transfer.h"
#include "tests/ops/cases.h"
#include "tests/ops/reference/table.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;

struct Shape {
  std::vector<int64_t> rows, context;  ///< of each sequence
  int64_t heads, kv_heads, d, page;
  int64_t window = 0;
  bool reversed = false;  ///< pages lie in descending order, and apart
  int64_t gap = 3;        ///< between the rows of q

  std::string name() const {
    return fmt::format("({} of {}) {}/{} D{} pages of {}{}{}", fmt::join(rows, ","), fmt::join(context, ","),
                       heads, kv_heads, d, page, window ? fmt::format(" window {}", window) : "",
                       reversed ? " reversed" : "");
  }
};

/// Sequence s has the same numbers in every problem that has it, wherever its pages lie and whatever the
/// other sequences are. Unused rows of the cache are NaN.
struct Problem {
  Shape s;
  Buffer q, keys, values, out, cu, context, table;

  Problem(DType t, const Shape& shape, int64_t first_sequence = 0) : s(shape) {
    const auto sequences = static_cast<int64_t>(s.rows.size());
    int64_t width = 0, pages = 0, rows = 0;
    for (size_t i = 0; i < s.rows.size(); ++i) {
      const int64_t n = (s.context[i] + s.page - 1) / s.page;
      width = std::max(width, n + 1), pages += n, rows += s.rows[i];
    }
    const int64_t step = s.reversed ? 2 : 1;
    q = Buffer(t, {rows, s.heads, s.d}, s.gap);
    keys = Buffer(t, {(pages + 1) * step * s.page, s.kv_heads, s.d}).fill(NAN);
    values = Buffer(t, {(pages + 1) * step * s.page, s.kv_heads, s.d}).fill(NAN);
    out = Buffer(t, {rows, s.heads, s.d}, s.gap).fill(7);
    cu = Buffer(DType::i32, {sequences + 1});
    context = Buffer(DType::i32, {sequences});
    table = Buffer(DType::i32, {sequences, width}).fill(1 << 30);
    int64_t page = 0, row = 0;
    const int64_t head = s.kv_heads * s.d;
    for (int64_t i = 0; i < sequences; ++i) {
      const auto at = static_cast<size_t>(i);
      const std::string name = fmt::format("sequence {}", first_sequence + i);
      // Numbered from the end of the sequence, so that a query is the same with fewer rows before it.
      const int64_t n = s.context[at], most = 300;
      const Buffer k = Buffer(t, {most, head}).normal(name + " k"),
                   v = Buffer(t, {most, head}).normal(name + " v"),
                   x = Buffer(t, {most, s.heads * s.d}).normal(name + " q", 1.5);
      for (int64_t token = 0; token < n; ++token) {
        if (token % s.page == 0)
          table.set(i * width + token / s.page,
                    static_cast<double>(s.reversed ? (pages - page++) * step - 1 : page++));
        const auto place =
            static_cast<int64_t>(table.get(i * width + token / s.page)) * s.page + token % s.page;
        for (int64_t c = 0; c < head; ++c) {
          keys.set(place * head + c, k.get(token * head + c));
          values.set(place * head + c, v.get(token * head + c));
        }
      }
      for (int64_t r = n - s.rows[at]; r < n; ++r, ++row)
        for (int64_t c = 0; c < s.heads * s.d; ++c)
          q.set(row * s.heads * s.d + c, x.get(r * s.heads * s.d + c));
      cu.set(i + 1, static_cast<double>(row));
      context.set(i, static_cast<double>(n));
    }
  }
  AttentionPaged arguments() const {
    return {.q = q,
            .keys = keys,
            .values = values,
            .out = out,
            .cu_q = cu,
            .context = context,
            .block_table = table,
            .page = s.page,
            .scale = 1.0f / std::sqrt(static_cast<float>(s.d)),
            .window = s.window};
  }
  /// With exactly the workspace that is asked for.
  void run(Exec& e) const {
    const AttentionPaged a = arguments();
    const size_t bytes = ops::workspace(e, a);
    const Buffer memory = Buffer(DType::i32, {static_cast<int64_t>(bytes / sizeof(int32_t)) + 1}).fill(-1);
    Exec exact = e;
    exact.workspace = {static_cast<std::byte*>(memory.tensor().data), bytes};
    attention_paged(exact, a);
    synchronize(exact);
  }
  std::vector<double> row(int64_t r) const {
    std::vector<double> all = out.values();
    const int64_t n = s.heads * s.d;
    return {all.begin() + r * n, all.begin() + (r + 1) * n};
  }
};

Outputs attend(Exec& e, const Shape& s, DType t) {
  const Problem p(t, s);
  p.run(e);
  return {{"out", p.out, s.d + *std::max_element(s.context.begin(), s.context.end())}};
}

Outputs write(Exec& e, DType t, int64_t n, int64_t width, int64_t gap) {
  const Buffer keys = Buffer(t, {n, width}, gap).normal("keys"),
               values = Buffer(t, {n, width}, gap).normal("values");
  Buffer key_cache = Buffer(t, {2 * n + 3, width}).fill(5),
         value_cache = Buffer(t, {2 * n + 3, width}).fill(6);
  Buffer slots(DType::i32, {n});
  for (int64_t i = 0; i < n; ++i) slots.set(i, static_cast<double>(i % 5 == 3 ? -1 : (2 * n + 1 - 2 * i)));
  cache_write(
      e,
      {.keys = keys, .values = values, .slots = slots, .key_cache = key_cache, .value_cache = value_cache});
  synchronize(e);
  return {{"keys", key_cache}, {"values", value_cache}};
}

/// A row has the same bits alone and among others, in pages of any size, with rows of a prompt before it, and
/// on any number of threads.
void bits(Exec& e) {
  for (const DType t : {DType::f32, DType::bf16})
    for (const int64_t window : {0, 70}) {
      const Problem alone(t, {{1}, {131}, 4, 2, 32, 16, window}, 1);
      alone.run(e);
      const auto want = alone.row(0);
      for (const Shape& s :
           {Shape{{1}, {131}, 4, 2, 32, 1, window}, Shape{{1}, {131}, 4, 2, 32, 64, window, true},
            Shape{{131}, {131}, 4, 2, 32, 16, window}, Shape{{7}, {131}, 4, 2, 32, 5, window, true}}) {
        const Problem p(t, s, 1);
        p.run(e);
        expect(p.row(s.rows[0] - 1) == want, s.name());
      }
      const Shape more{{40, 1, 0, 3}, {90, 131, 12, 3}, 4, 2, 32, 16, window, true};
      const Problem p(t, more, 0);
      for (const int threads : {1, 3}) {
        Exec exec = e;
        exec.threads = threads;
        p.run(exec);
        expect(p.row(40) == want, more.name());
      }
    }
}

/// Attention of a whole prompt equals attention_forward() to the rounding of sums.
void as_training(Exec& e) {
  const Problem p(DType::f32, {{100}, {100}, 4, 2, 24, 16, 0, true});
  p.run(e);
  const Problem straight(DType::f32, {{100}, {100}, 4, 2, 24, 100});
  Buffer out(DType::f32, {100, 4, 24});
  Exec reference{.kernels = &reference_kernels()};
  attention_forward(reference, {.q = straight.q,
                                .k = straight.keys.tensor().rows(0, 100),
                                .v = straight.values.tensor().rows(0, 100),
                                .out = out,
                                .cu_q = straight.cu,
                                .cu_k = straight.cu,
                                .scale = p.arguments().scale});
  expect(error_of(p.out, out) < 2e-6 + exp_tolerance(e), fmt::format("{}", error_of(p.out, out)));
}

/// Scores of a thousand and more neither overflow nor lose the softmax; a NaN stays in its sequence.
void extremes(Exec& e) {
  Problem p(DType::f32, {{5, 70}, {40, 70}, 2, 1, 16, 8});
  Problem want = p;
  for (int64_t i = 0; i < p.q.size(); ++i) {
    p.q.set(i, p.q.get(i) * 150);
    want.q.set(i, p.q.get(i));
  }
  want.out = Buffer(DType::f32, {75, 2, 16});
  Exec reference{.kernels = &reference_kernels()};
  attention_paged(reference, want.arguments());
  p.run(e);
  expect(error_of(p.out, want.out) < 1e-3, "large scores");
  p.keys.set(3 * 16, NAN);  // first sequence
  p.run(e);
  for (int64_t i = 0; i < 75; ++i)
    expect(std::isnan(p.out.get(i * 32)) == (i < 5), fmt::format("row {} is {}", i, p.out.get(i * 32)));
}

}  // namespace

NRL_OP_CASES(paged) {
  for (const DType t : {DType::f32, DType::bf16, DType::f16}) {
    for (const Shape& s :
         {Shape{{1}, {1}, 1, 1, 8, 1}, Shape{{1}, {200}, 4, 4, 64, 16},
          Shape{{1, 1, 1}, {1, 65, 128}, 6, 2, 64, 16, 0, true},
          Shape{{40, 1, 9}, {40, 77, 300}, 8, 2, 32, 16, 0, true}, Shape{{3, 0, 2}, {9, 4, 2}, 3, 1, 18, 5},
          Shape{{65, 1}, {129, 200}, 4, 1, 40, 64, 50}, Shape{{1, 20}, {150, 150}, 5, 5, 128, 16, 1, true},
          Shape{{2}, {70}, 9, 1, 256, 7}, Shape{{1}, {33}, 40, 1, 16, 16}})
      registry.tests.push_back({fmt::format("paged.attention {} {}", s.name(), nrl::name_of(t)),
                                [=](Exec& e) { return attend(e, s, t); }, true});
    for (const auto& [n, width, gap] :
         {std::tuple<int64_t, int64_t, int64_t>{1, 8, 0}, {33, 192, 8}, {5, 18, 1}, {300, 64, 64}})
      registry.tests.push_back({fmt::format("paged.write {} x {} {}", n, width, nrl::name_of(t)),
                                [=](Exec& e) { return write(e, t, n, width, gap); }, true});
  }
  registry.properties.push_back({"paged.bits", bits});
  registry.properties.push_back({"paged.as training", as_training});
  registry.properties.push_back({"paged.extremes", extremes});
}

}  // namespace nrl::ops_test
