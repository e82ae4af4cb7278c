#include <cmath>

#include "core/ops/dropout.h"
#include "core/ops/norm.h"
#include "core/ops/transfer.h"
#include "tests/ops/cases.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;

constexpr uint64_t seed = 0x123456789abcdefull, stream = 0xfedcba9876543210ull;

/// The mask of some rows does not depend on which call they belong to.
void rows_can_be_split(Exec& e) {
  const int64_t n = 23, h = 61;
  Buffer x = Buffer(DType::f32, {n, h}).fill(1.0), whole(DType::f32, {n, h}), parts(DType::f32, {n, h});
  dropout(e, {.x = x, .out = whole, .p = 0.3f, .seed = seed, .stream = stream, .first_row = 1000});
  for (auto [begin, count] : {std::pair<int64_t, int64_t>{0, 1}, {1, 7}, {8, 15}}) {
    dropout(e, {.x = x.tensor().rows(begin, count),
                .out = parts.tensor().rows(begin, count),
                .p = 0.3f,
                .seed = seed,
                .stream = stream,
                .first_row = 1000 + begin});
  }
  expect(same_bits(whole, parts), "the mask depends on how rows are split");
  int64_t kept = 0;
  for (int64_t i = 0; i < whole.size(); ++i) kept += whole.get(i) != 0.0;
  const double rate = static_cast<double>(kept) / static_cast<double>(whole.size());
  expect(std::fabs(rate - 0.7) < 0.06, fmt::format("kept {} of all elements, wanted 0.7", rate));
}

/// Rows of a table have the masks of those rows.
void rows_can_be_listed(Exec& e) {
  const int64_t n = 23, h = 64;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    Buffer x = Buffer(dtype, {n, h}).normal("x"), whole(dtype, {n, h}), some(dtype, {n, h});
    Buffer rows(DType::i32, {n}), picked(dtype, {n, h}), residual(dtype, {n, h}), sum(dtype, {n, h}),
        out(dtype, {n, h});
    const Buffer weight = Buffer(dtype, {h}).fill(1.0);
    Buffer rstd(DType::f32, {n});
    for (int64_t i = 0; i < n; ++i) {
      const int64_t row = i * 7 % n;
      rows.set(i, static_cast<double>(row));
      for (int64_t c = 0; c < h; ++c) picked.set(i * h + c, x.get(row * h + c));
    }
    Dropout a{.x = x, .out = whole, .p = 0.3f, .seed = seed, .stream = stream, .first_row = 1000};
    dropout(e, a);
    a.x = picked, a.out = some, a.rows = rows;
    dropout(e, a);
    norm_forward(e, {.x = picked,
                     .residual = residual,
                     .sum = sum,
                     .weight = weight,
                     .out = out,
                     .rstd = rstd,
                     .dropout = {a.p, a.seed, a.stream, a.first_row, {}, rows}});
    synchronize(e);
    for (int64_t i = 0; i < n * h; ++i) {
      expect(some.get(i) == whole.get(i / h * 7 % n * h + i % h), "a row has another row's mask");
      expect(sum.get(i) == some.get(i), "a norm has another mask than the op");
    }
  }
}

/// Columns of wider rows have the masks that they have in those.
void columns_can_be_split(Exec& e) {
  const int64_t n = 7, h = 64;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Buffer x = Buffer(dtype, {n, h}).normal("x");
    Buffer whole(dtype, {n, h}), parts(dtype, {n, h});
    Dropout a{.x = x, .out = whole, .p = 0.3f, .seed = seed, .stream = stream, .first_row = 3};
    dropout(e, a);
    a.width = h;
    for (const auto& [begin, count] : {std::pair<int64_t, int64_t>{0, 16}, {16, 32}, {48, 3}, {51, 13}}) {
      a.x = x.tensor().columns(begin, count);
      a.out = parts.tensor().columns(begin, count);
      a.first_column = begin;
      dropout(e, a);
    }
    expect(same_bits(whole, parts), "the mask depends on how columns are split");
  }
}

/// The step names another stream, read from memory.
void steps_have_their_masks(Exec& e) {
  const Buffer x = Buffer(DType::bf16, {8, 64}).fill(1.0);
  auto mask = [&](uint64_t name, int64_t number) {
    Buffer out(DType::bf16, {8, 64});
    const Buffer step = Buffer(DType::i64, {1}).fill(static_cast<double>(number));
    Dropout a{.x = x, .out = out, .p = 0.5f, .seed = seed, .stream = name};
    if (number >= 0) a.step = step;
    dropout(e, a);
    return out;
  };
  expect(same_bits(mask(7, 5), mask((uint64_t{5} << 24) | 7, -1)),
         "the step is not the upper bits of the stream");
  expect(same_bits(mask(7, 0), mask(7, -1)), "step 0 changes the stream");
  expect(!same_bits(mask(7, 5), mask(7, 6)), "two steps have one mask");
}

}  // namespace

NRL_OP_CASES(dropout) {
  for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    struct Shape {
      int64_t n, h, x_gap = 3, out_gap = 1;
    };
    for (const Shape& s : {Shape{1, 1},
                           {7, 31},
                           {61, 257},
                           {3, 1024},
                           {64, 600},
                           {5, 1032, 8, 16},
                           {70, 24, 0, 0},
                           {9, 12, 4, 4}}) {
      for (double p : {0.0, 0.1, 0.75}) {
        for (int64_t first_row : {int64_t{0}, int64_t{3}, int64_t{1} << 34}) {
          const bool with_step = first_row == 3;
          registry.tests.push_back({fmt::format("dropout.{} ({}, {}) gaps {} {} p {} from {}", name_of(dtype),
                                                s.n, s.h, s.x_gap, s.out_gap, p, first_row),
                                    [=](Exec& e) -> Outputs {
                                      const Buffer x = Buffer(dtype, {s.n, s.h}, s.x_gap).normal("x");
                                      Buffer out(dtype, {s.n, s.h}, s.out_gap);
                                      const Buffer step = Buffer(DType::i64, {1}).fill(123456);
                                      Dropout a{.x = x,
                                                .out = out,
                                                .p = static_cast<float>(p),
                                                .seed = seed,
                                                .stream = with_step ? 0xabcd : stream,
                                                .first_row = first_row};
                                      if (with_step) a.step = step;
                                      dropout(e, a);
                                      return {{"out", out}};
                                    },
                                    true});
        }
      }
    }
  }
  registry.properties.push_back({"dropout.rows_can_be_listed", rows_can_be_listed});
  registry.properties.push_back({"dropout.rows", rows_can_be_split});
  registry.properties.push_back({"dropout.columns", columns_can_be_split});
  registry.properties.push_back({"dropout.steps", steps_have_their_masks});
}

}  // namespace nrl::ops_test
