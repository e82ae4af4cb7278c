#include <cmath>

#include "core/ops/segments.h"
#include "core/ops/transfer.h"
#include "tests/ops/cases.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;

/// Rows of segments one behind the other, or mixed up as in a rank's halves of sequences.
enum class Layout : uint8_t { packed, mixed };

/// Rows of `segments` segments; some rows have no target, some no segment, one segment has no rows.
struct Rows {
  Buffer x, minus, target, segment;
  Rows(int64_t n, int64_t segments, Layout layout) {
    x = Buffer(DType::f32, {n}).normal("x", 3.0, -1.0);
    minus = Buffer(DType::f32, {n}).normal("minus", 3.0, -1.0);
    target = Buffer(DType::i32, {n}).integers("target", -1, 5);
    segment = Buffer(DType::i32, {n});
    Buffer any = Buffer(DType::i32, {n}).integers("segment", -1, segments);
    for (int64_t i = 0; i < n; ++i) {
      int64_t s = layout == Layout::mixed ? static_cast<int64_t>(any.get(i)) : i * (segments + 1) / n;
      if (s == segments / 2 && segments > 2) s = -1;
      segment.set(i, static_cast<double>(s));  // packed: the last rows are in a segment that does not exist
    }
  }
};

Outputs sum(Exec& e, int64_t n, int64_t segments, Layout layout, bool minus) {
  const Rows r(n, segments, layout);
  Buffer out = Buffer(DType::f64, {segments}).fill(NAN);
  segment_sum(e, {.x = r.x,
                  .minus = minus ? r.minus.tensor() : Tensor{},
                  .target = r.target,
                  .segment = r.segment,
                  .out = out});
  synchronize(e);
  return {{"out", out}};
}

Outputs rows(Exec& e, int64_t n, int64_t segments, Layout layout) {
  const Rows r(n, segments, layout);
  const Buffer values = Buffer(DType::f64, {segments}).normal("values");
  Buffer out = Buffer(DType::f32, {n}).fill(NAN);
  segment_rows(e, {.values = values, .target = r.target, .segment = r.segment, .out = out});
  synchronize(e);
  return {{"out", out}};
}

/// A sequence of 700 rows has the same bits alone, behind others, between others and on any number of
/// threads; rows that do not count are not read. They equal a sum in long double.
void places(Exec& e) {
  constexpr int64_t own = 700;
  const Buffer values = Buffer(DType::f32, {own}).normal("values", 2.0, -3.0);
  long double exact = 0;
  for (int64_t i = 0; i < own; ++i) exact += i % 7 == 3 ? 0.0L : static_cast<long double>(values.get(i));
  double first = 0;
  for (const auto& [offset, stride, s] :
       {std::tuple{0, 1, 0}, {1, 1, 1}, {255, 1, 2}, {256, 1, 0}, {999, 1, 2}, {0, 2, 1}, {3, 5, 2}}) {
    const int64_t n = offset + own * stride + 13;
    Buffer x = Buffer(DType::f32, {n}).normal("others"), out(DType::f64, {3});
    Buffer target(DType::i32, {n}), segment = Buffer(DType::i32, {n}).fill((s + 1) % 3);
    for (int64_t i = 0; i < own; ++i) {
      const int64_t row = offset + i * stride;
      x.set(row, i % 7 == 3 ? NAN : values.get(i));
      target.set(row, i % 7 == 3 ? -1 : 0);
      segment.set(row, s);
    }
    x.set(n - 1, NAN);
    segment.set(n - 1, -1);
    x.set(n - 2, NAN);
    segment.set(n - 2, 3);
    for (const int threads : {1, 2, 5}) {
      Exec exec = e;
      exec.threads = threads;
      segment_sum(exec, {.x = x, .target = target, .segment = segment, .out = out});
      synchronize(exec);
      if (first == 0) first = out.get(s);
      expect(out.get(s) == first,
             fmt::format("at {} every {}: {} and {}", offset, stride, out.get(s), first));
      expect(out.get((s + 2) % 3) == 0, "an empty segment has a sum");
    }
  }
  expect(std::fabs(first - static_cast<double>(exact)) < 1e-12 * own * 3, fmt::format("{}", first));
}

/// Without rows the sums are 0.
void without_rows(Exec& e) {
  Buffer out = Buffer(DType::f64, {3}).fill(NAN);
  const Tensor f32 = make_tensor(nullptr, DType::f32, {0}), i32 = make_tensor(nullptr, DType::i32, {0});
  segment_sum(e, {.x = f32, .target = i32, .segment = i32, .out = out});
  segment_rows(e, {.values = out, .target = i32, .segment = i32, .out = f32});
  synchronize(e);
  for (int64_t s = 0; s < 3; ++s) expect(out.get(s) == 0, "a sum without rows");
}

}  // namespace

NRL_OP_CASES(segments) {
  for (const auto& [n, segments] :
       {std::pair<int64_t, int64_t>{1, 1}, {33, 2}, {257, 5}, {3000, 3}, {900, 301}})
    for (const Layout layout : {Layout::packed, Layout::mixed}) {
      const char* name = layout == Layout::packed ? "packed" : "mixed";
      for (const bool minus : {false, true})
        registry.tests.push_back(
            {fmt::format("segments.sum {} of {} {}{}", segments, n, name, minus ? " minus" : ""),
             [=](Exec& e) { return sum(e, n, segments, layout, minus); }, true});
      registry.tests.push_back({fmt::format("segments.rows {} of {} {}", segments, n, name),
                                [=](Exec& e) { return rows(e, n, segments, layout); }, true});
    }
  registry.properties.push_back({"segments.places", places});
  registry.properties.push_back({"segments.without rows", without_rows});
}

}  // namespace nrl::ops_test
