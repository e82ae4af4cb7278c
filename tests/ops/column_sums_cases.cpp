#include <algorithm>

#include "core/ops/linear.h"
#include "core/ops/transfer.h"
#include "tests/ops/cases.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;

Outputs sums(Exec& e, DType dtype, int64_t n, int64_t m, int64_t gap, int64_t first, bool accumulate) {
  // A column slice of a wider matrix, as a bias of one part of a fused projection has it.
  const Buffer wide = Buffer(dtype, {n, first + m}, gap).normal("x", 1.0, 0.1);
  Buffer out = Buffer(DType::f32, {m}).normal("out");
  Exec exact = e;
  exact.workspace.size = std::min(column_sums_workspace(m, e.partials()), e.workspace.size);
  column_sums(exact, {.x = wide.tensor().columns(first, m), .out = out, .accumulate = accumulate});
  return {{"out", out, n}};
}

void no_rows(Exec& e) {
  const Tensor none = make_tensor(nullptr, DType::bf16, {0, 5});
  Buffer kept = Buffer(DType::f32, {5}).fill(2), cleared = kept;
  column_sums(e, {.x = none, .out = kept, .accumulate = true});
  column_sums(e, {.x = none, .out = cleared, .accumulate = false});
  synchronize(e);
  for (int64_t i = 0; i < 5; ++i) expect(kept.get(i) == 2 && cleared.get(i) == 0, "sums over no rows");
}

void wrong_arguments(Exec& e) {
  const Buffer x(DType::f32, {3, 4}), out(DType::f32, {3});
  try {
    column_sums(e, {.x = x, .out = out});
  } catch (const Error& error) {
    expect(error.code() == Exit::internal, "another exit code");
    return;
  }
  expect(false, "an output of another length");
}

}  // namespace

NRL_OP_CASES(column_sums) {
  struct Case {
    int64_t n, m, gap, first;
  };
  for (const Case& c : {Case{1, 1, 0, 0},
                        {7, 33, 0, 0},
                        {40, 256, 0, 0},
                        {100, 264, 8, 8},
                        {257, 61, 3, 0},
                        {65, 300, 0, 3},
                        {5000, 40, 0, 0},
                        {4097, 7, 0, 1}})
    for (DType dtype : {DType::f32, DType::bf16, DType::f16})
      for (bool accumulate : {false, true})
        registry.tests.push_back(
            {fmt::format("column_sums.{} ({}, {}) gap {} from {}{}", name_of(dtype), c.n, c.m, c.gap, c.first,
                         accumulate ? " accumulate" : ""),
             [=](Exec& e) { return sums(e, dtype, c.n, c.m, c.gap, c.first, accumulate); }, true});
  registry.properties.push_back({"column_sums.no_rows", no_rows});
  registry.properties.push_back({"column_sums.wrong_arguments", wrong_arguments});
}

}  // namespace nrl::ops_test
