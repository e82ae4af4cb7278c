#include "core/ops/dropout/dropout.h"

#include <cmath>

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

}  // namespace

NRL_OP_CASES(dropout) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    for (auto [n, h] : {std::pair<int64_t, int64_t>{1, 1}, {7, 31}, {61, 257}, {3, 1024}, {64, 600}}) {
      for (double p : {0.0, 0.1, 0.75}) {
        for (int64_t first_row : {int64_t{0}, int64_t{3}, int64_t{1} << 34}) {
          registry.tests.push_back(
              {fmt::format("dropout.{} ({}, {}) p {} from {}", name_of(dtype), n, h, p, first_row),
               [=](Exec& e) -> Outputs {
                 const Buffer x = Buffer(dtype, {n, h}, 3).normal("x");
                 Buffer out(dtype, {n, h}, 1);
                 dropout(e, {.x = x,
                             .out = out,
                             .p = static_cast<float>(p),
                             .seed = seed,
                             .stream = stream,
                             .first_row = first_row});
                 return {{"out", out}};
               },
               true});
        }
      }
    }
    const int64_t n = 8192, h = 1024;
    registry.perfs.push_back(
        {fmt::format("dropout.{} ({}, {})", name_of(dtype), n, h), [=] {
           auto x = std::make_shared<Buffer>(dtype, std::vector<int64_t>{n, h});
           return PerfProblem{
               [=](Exec& e) { dropout(e, {.x = *x, .out = *x, .p = 0.1f, .seed = 1, .stream = 2}); },
               static_cast<double>(2 * x->tensor().bytes())};
         }});
  }
  registry.properties.push_back({"dropout.rows", rows_can_be_split});
}

}  // namespace nrl::ops_test
