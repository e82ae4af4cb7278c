#include <algorithm>
#include <cmath>

#include "core/ops/gemm/packed_sizes.h"
#include "core/ops/peak.h"
#include "core/ops/transfer.h"
#include "tests/ops/cases.h"
#include "tests/ops/reference/table.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;

struct Shape {
  int64_t n, m, k, gap = 0;
};

/// exec with exactly the workspace that the op asked for, so that a byte too few is found. A GPU's lies
/// in its memory.
struct ExactWorkspace {
  ExactWorkspace(Exec e, const Shape& s, DType t) : exec(e) {
    if (e.libraries) {
      exec.workspace.size = gpu_linear_workspace(s.m, e.partials());
      return;
    }
    // NaN: what panels are not filled with must not be multiplied.
    memory.assign(linear_workspace(s.n, s.m, s.k, t, e.threads, e.kernels->bf16_products), std::byte{0xff});
    exec.workspace = {memory.data(), memory.size()};
  }
  std::vector<std::byte> memory;
  Exec exec;
};

Outputs forward(Exec& e, const Shape& s, DType t, Activation activation, bool bias, bool accumulate) {
  const Buffer x = Buffer(t, {s.n, s.k}, s.gap).normal("x"), w = Buffer(t, {s.m, s.k}, s.gap).normal("w"),
               b = Buffer(t, {s.m}).normal("b");
  Buffer out = Buffer(t, {s.n, s.m}, s.gap).normal("out");
  LinearForward a{.x = x, .weight = w, .out = out, .activation = activation, .accumulate = accumulate};
  if (bias) a.bias = b;
  ExactWorkspace exact(e, s, t);
  linear_forward(exact.exec, a);
  return {{"out", out, s.k}};
}

Outputs backward_data(Exec& e, const Shape& s, DType t, bool accumulate) {
  const Buffer dout = Buffer(t, {s.n, s.m}, s.gap).normal("dout"),
               w = Buffer(t, {s.m, s.k}, s.gap).normal("w");
  Buffer dx = Buffer(t, {s.n, s.k}, s.gap).normal("dx");
  ExactWorkspace exact(e, s, t);
  linear_backward_data(exact.exec, {dout, w, dx, accumulate});
  return {{"dx", dx, s.m}};
}

/// A product that is scaled, as the factors of adapters are: few columns forward, few inner ones backward.
Outputs scaled(Exec& e, const Shape& s, DType t) {
  const Buffer x = Buffer(t, {s.n, s.k}, s.gap).normal("x"), w = Buffer(t, {s.m, s.k}, s.gap).normal("w"),
               dout = Buffer(t, {s.n, s.m}, s.gap).normal("dout");
  Buffer out = Buffer(t, {s.n, s.m}, s.gap).normal("out"), dx = Buffer(t, {s.n, s.k}, s.gap).normal("dx");
  ExactWorkspace exact(e, s, t);
  linear_forward(exact.exec, {.x = x, .weight = w, .out = out, .scale = 0.5f});
  ExactWorkspace backward(e, {s.n, std::max(s.m, s.k), std::max(s.m, s.k)}, t);
  linear_backward_data(backward.exec, {.dout = dout, .weight = w, .dx = dx, .scale = 3.0f});
  return {{"out", out, s.k}, {"dx", dx, s.m}};
}

/// The activation fused into the products on its both sides, as an MLP has it.
Outputs fused_activation(Exec& e, const Shape& s, DType t, Activation activation, bool bias) {
  const Buffer x = Buffer(t, {s.n, s.k}, s.gap).normal("x"),
               w = Buffer(t, {s.m, s.k}, s.gap).normal("w", 1.0 / std::sqrt(static_cast<double>(s.k))),
               b = Buffer(t, {s.m}).normal("b"), dout = Buffer(t, {s.n, s.k}, s.gap).normal("dout"),
               w2 = Buffer(t, {s.k, s.m}, s.gap).normal("w2", 1.0 / std::sqrt(static_cast<double>(s.k)));
  Buffer pre(t, {s.n, s.m}, s.gap), out(t, {s.n, s.m}, s.gap), dx(t, {s.n, s.m}, s.gap);
  LinearForward f{.x = x, .weight = w, .out = out, .activation = activation};
  f.pre_activation = pre;
  if (bias) f.bias = b;
  ExactWorkspace exact(e, {s.n, std::max(s.m, s.k), std::max(s.m, s.k)}, t);
  linear_forward(exact.exec, f);
  const Buffer given = Buffer(t, {s.n, s.m}, s.gap).normal("given");  // the same on all backends
  linear_backward_data(
      exact.exec, {.dout = dout, .weight = w2, .dx = dx, .activation = activation, .pre_activation = given});
  return {{"pre_activation", pre, s.k}, {"out", out, s.k}, {"dx", dx, s.k}};
}

Outputs backward_weight(Exec& e, const Shape& s, DType t, bool accumulate) {
  const Buffer dout = Buffer(t, {s.n, s.m}, s.gap).normal("dout"),
               x = Buffer(t, {s.n, s.k}, s.gap).normal("x");
  Buffer dw = Buffer(DType::f32, {s.m, s.k}, s.gap).normal("dw"), db = Buffer(DType::f32, {s.m}).normal("db");
  ExactWorkspace exact(e, s, t);
  linear_backward_weight(exact.exec,
                         {.dout = dout, .x = x, .dweight = dw, .dbias = db, .accumulate = accumulate});
  return {{"dweight", dw, s.n}, {"dbias", db, s.n}};
}

struct Problem {
  Buffer x, w, b, dout, out, dx, dw, db;
};

GradProblem gradient(DType t, const Shape& s) {
  auto p = std::make_shared<Problem>();
  p->x = Buffer(t, {s.n, s.k}, 3).normal("x");
  p->w = Buffer(t, {s.m, s.k}).normal("w");
  p->b = Buffer(t, {s.m}).normal("b");
  p->dout = Buffer(t, {s.n, s.m}, 1).normal("dout");
  p->out = Buffer(t, {s.n, s.m}, 2);
  p->dx = Buffer(t, {s.n, s.k}, 5);
  p->dw = Buffer(t, {s.m, s.k});
  p->db = Buffer(t, {s.m});
  GradProblem g;
  g.keep = p;
  g.reduction_length = std::max({s.n, s.m, s.k});
  g.inputs = {&p->x, &p->w, &p->b};
  g.gradients = {&p->dx, &p->dw, &p->db};
  g.loss = [p](Exec& e) {
    e.kernels->linear_forward(e, {.x = p->x, .weight = p->w, .bias = p->b, .out = p->out});
    return dot(p->out, p->dout);
  };
  g.backward = [p](Exec& e) {
    e.kernels->linear_backward_data(e, {.dout = p->dout, .weight = p->w, .dx = p->dx});
    e.kernels->linear_backward_weight(e, {.dout = p->dout, .x = p->x, .dweight = p->dw, .accumulate = false});
    e.kernels->column_sums(e, {.x = p->dout, .out = p->db, .accumulate = false});
  };
  return g;
}

/// Operands of different types, over several blocks of rows and columns.
void mixed_types(Exec& e) {
  if (e.libraries) return;  // a GPU multiplies one type
  const int64_t n = packed::block_rows + 3, m = packed::block_columns + 5, k = 2;
  const Buffer x = Buffer(DType::f32, {n, k}).normal("x"), w = Buffer(DType::bf16, {m, k}).normal("w"),
               b = Buffer(DType::f32, {m}).normal("b");
  Buffer out(DType::f32, {n, m}), want(DType::f32, {n, m});
  linear_forward(e, {.x = x, .weight = w, .bias = b, .out = out});
  Exec reference{.kernels = &reference_kernels()};
  linear_forward(reference, {.x = x, .weight = w, .bias = b, .out = want});
  expect(error_of(out, want) <= tolerance(DType::f32, k), "an f32 input with a bf16 weight");

  const Buffer dout = Buffer(DType::bf16, {n, m}).normal("dout");
  Buffer dx(DType::f32, {n, k}), dw(DType::f32, {m, k}), want_dx(DType::f32, {n, k}),
      want_dw(DType::f32, {m, k});
  linear_backward_data(e, {.dout = dout, .weight = w, .dx = dx});
  linear_backward_data(reference, {.dout = dout, .weight = w, .dx = want_dx});
  expect(error_of(dx, want_dx) <= tolerance(DType::f32, m), "dx over several blocks");
  linear_backward_weight(e, {.dout = dout, .x = x, .dweight = dw, .accumulate = false});
  linear_backward_weight(reference, {.dout = dout, .x = x, .dweight = want_dw, .accumulate = false});
  expect(error_of(dw, want_dw) <= tolerance(DType::f32, n), "dweight over several blocks");
}

/// Packed GEMMs sum in the order of the inner dimension alone: threads, other rows and other columns change
/// no bit.
void packed_bits_of(Exec& e, DType t) {
  const Shape s{311, 2100, 2113, 5};
  const Buffer x = Buffer(t, {s.n, s.k}, s.gap).normal("x"), w = Buffer(t, {s.m, s.k}, s.gap).normal("w"),
               dout = Buffer(t, {s.n, s.m}, s.gap).normal("dout");
  struct Results {
    Buffer out, dx, dw;
  };
  const auto results = [&](int threads, int64_t first, int64_t rows) {
    Results r{Buffer(t, {rows, s.m}), Buffer(t, {rows, s.k}), Buffer(DType::f32, {s.m, s.k})};
    Exec own = e;
    own.threads = threads;
    ExactWorkspace exact(own, s, t);
    const Tensor part = x.tensor().rows(first, rows), dpart = dout.tensor().rows(first, rows);
    linear_forward(exact.exec, {.x = part, .weight = w, .out = r.out});
    linear_backward_data(exact.exec, {.dout = dpart, .weight = w, .dx = r.dx});
    linear_backward_weight(exact.exec, {.dout = dpart, .x = part, .dweight = r.dw, .accumulate = false});
    return r;
  };
  const Results one = results(1, 0, s.n);
  for (int threads : {2, 3, 5}) {
    const Results many = results(threads, 0, s.n);
    expect(same_bits(one.out, many.out) && same_bits(one.dx, many.dx) && same_bits(one.dw, many.dw),
           fmt::format("{}: {} threads give other bits", name_of(t), threads));
  }
  const int64_t first = 100, rows = 17;
  const Results part = results(2, first, rows);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < s.m; ++j)
      expect(part.out.get(i * s.m + j) == one.out.get((first + i) * s.m + j), "out of fewer rows");
    for (int64_t j = 0; j < s.k; ++j)
      expect(part.dx.get(i * s.k + j) == one.dx.get((first + i) * s.k + j), "dx of fewer rows");
  }
}

void packed_bits(Exec& e) {
  if (e.libraries) return;
  for (const DType t : {DType::f32, DType::bf16, DType::f16}) packed_bits_of(e, t);
}

/// Few rows are multiplied by another kernel, in pieces of the inner dimension too: with the bits of many.
void few_rows_bits(Exec& e) {
  if (e.libraries) return;
  for (const DType t : {DType::f32, DType::bf16, DType::f16})
    for (const Shape& s :
         {Shape{64, 70, 96}, Shape{64, 129, 2112}, Shape{64, 300, 4160, 6}, Shape{64, 45, 61}}) {
      const Buffer x = Buffer(t, {s.n, s.k}, s.gap).normal("x"), w = Buffer(t, {s.m, s.k}, s.gap).normal("w"),
                   b = Buffer(t, {s.m}).normal("b");
      const auto product = [&](int64_t first, int64_t rows, int threads) {
        Buffer out(t, {rows, s.m}, 3);
        Exec own = e;
        own.threads = threads;
        ExactWorkspace exact(own, {rows, s.m, s.k}, t);
        linear_forward(exact.exec, {.x = x.tensor().rows(first, rows), .weight = w, .bias = b, .out = out});
        return out;
      };
      const Buffer all = product(0, s.n, 1);
      for (const auto& [first, rows] : {std::pair<int64_t, int64_t>{3, 2}, {5, 16}, {7, 17}, {32, 32}}) {
        const Buffer few = product(first, rows, 3);
        for (int64_t i = 0; i < rows; ++i)
          for (int64_t j = 0; j < s.m; ++j)
            expect(few.get(i * s.m + j) == all.get((first + i) * s.m + j),
                   fmt::format("{}: {} of {} rows, ({}, {})", name_of(t), rows, s.n, s.m, s.k));
      }
    }
}

/// Packed GEMMs over several blocks of columns, rows and inner elements, against the reference.
void packed_blocks_of(Exec& e, DType t) {
  Exec reference{.kernels = &reference_kernels(), .threads = 1};
  for (const Shape& s : {Shape{3, 2090, 2055, 3}, Shape{2055, 5, 2051}, Shape{15, 33, 4099, 1}})
    for (bool accumulate : {false, true})
      for (const auto& run : {forward(e, s, t, Activation::none, false, accumulate),
                              backward_data(e, s, t, accumulate), backward_weight(e, s, t, accumulate)}) {
        const Outputs want = run[0].name == "out"
                                 ? forward(reference, s, t, Activation::none, false, accumulate)
                             : run[0].name == "dx" ? backward_data(reference, s, t, accumulate)
                                                   : backward_weight(reference, s, t, accumulate);
        for (size_t i = 0; i < run.size(); ++i)
          expect(error_of(run[i].value, want[i].value) <=
                     tolerance(run[i].value.tensor().dtype, run[i].reduction_length),
                 fmt::format("{}: {} of ({}, {}, {}){}", name_of(t), run[i].name, s.n, s.m, s.k,
                             accumulate ? " +=" : ""));
      }
}

void packed_blocks(Exec& e) {
  if (e.libraries) return;
  for (const DType t : {DType::f32, DType::bf16, DType::f16}) packed_blocks_of(e, t);
}

/// Values that are not finite reach exactly the sums they are part of; the padding of an odd inner dimension
/// makes no NaN of an infinity.
void non_finite(Exec& e) {
  const int64_t n = 5, m = 40, k = 3;
  for (const DType t : {DType::f32, DType::bf16, DType::f16}) {
    Buffer x = Buffer(t, {n, k}).fill(1), w = Buffer(t, {m, k}).fill(2), out(t, {n, m});
    x.set(1 * k + 2, INFINITY);
    x.set(3 * k + 0, NAN);
    linear_forward(e, {.x = x, .weight = w, .out = out});
    synchronize(e);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < m; ++j) {
        const double v = out.get(i * m + j);
        expect(i == 1   ? v == INFINITY
               : i == 3 ? std::isnan(v)
                        : v == 6,
               fmt::format("{}: element ({}, {}) is {}", name_of(t), i, j, v));
      }
  }
}

/// What lies behind the rows and columns of an operand is not multiplied, not even with zeros.
void parts_of_matrices(Exec& e) {
  if (e.libraries) return;  // a GPU's rows are aligned
  const Shape s{3, 37, 35};
  for (const DType t : {DType::f32, DType::bf16, DType::f16}) {
    std::vector<Buffer> buffers;
    const auto ones = [&](int64_t rows, int64_t columns) {
      Buffer& b = buffers.emplace_back(Buffer(t, {rows + 1, columns + 1}).fill(NAN));
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) b.set(i * (columns + 1) + j, 1);
      return b.tensor().rows(0, rows).columns(0, columns);
    };
    const Tensor x = ones(s.n, s.k), w = ones(s.m, s.k), dout = ones(s.n, s.m);
    Buffer out(t, {s.n, s.m}), dx(t, {s.n, s.k}), dw(DType::f32, {s.m, s.k});
    ExactWorkspace exact(e, s, t);
    linear_forward(exact.exec, {.x = x, .weight = w, .out = out});
    linear_backward_data(exact.exec, {.dout = dout, .weight = w, .dx = dx});
    linear_backward_weight(exact.exec, {.dout = dout, .x = x, .dweight = dw, .accumulate = false});
    const auto all_are = [&](const Buffer& b, int64_t sum) {
      for (int64_t i = 0; i < b.tensor().numel(); ++i)
        expect(b.get(i) == static_cast<double>(sum), fmt::format("{}: {} of {}", name_of(t), b.get(i), sum));
    };
    all_are(out, s.k);
    all_are(dx, s.m);
    all_are(dw, s.n);
  }
}

void rates(Exec& e) {
  const double fma = measure_fma_peak(e.threads), gemm = measure_gemm_peak(e.threads);
  expect(fma > 0.5 && fma < 1e6, fmt::format("FMA peak of {} GFLOP/s", fma));
  expect(gemm > 0.05 && gemm < 1e6, fmt::format("GEMM rate of {} GFLOP/s", gemm));
}

void wrong_arguments(Exec& e) {
  const Buffer x(DType::f32, {3, 4}), w(DType::f32, {5, 6}), out(DType::f32, {3, 5});
  bool refused = false;
  try {
    linear_forward(e, {.x = x, .weight = w, .out = out});
  } catch (const Error& error) {
    refused = error.code() == Exit::internal;
  }
  expect(refused, "x (3, 4) with a weight (5, 6) was not refused");
}

}  // namespace

NRL_OP_CASES(linear) {
  const std::vector<Shape> shapes = {{1, 1, 1},
                                     {1, 7, 33, 3},
                                     {5, 64, 20},
                                     {129, 48, 65, 16},
                                     {61, 257, 31, 7},
                                     {513, 33, 24},
                                     {8, 16, 1030},
                                     {8, 16, 1030, 2},
                                     {2, 300, 1100},
                                     {1030, 17, 9, 1},
                                     {40, 300, 1056, 0},
                                     {0, 5, 4},
                                     {1, 2061, 301, 5},
                                     // Tiles of AMX that read rows in place: of two heights with a gap, in
                                     // pieces; and rows that it must pack.
                                     {48, 40, 64, 2},
                                     {32, 33, 2112},
                                     {16, 7, 320},
                                     {16, 40, 64, 1}};
  for (DType t : {DType::f32, DType::bf16, DType::f16}) {
    for (const Shape& s : shapes) {
      const std::string name = fmt::format("linear.{} ({}, {}, {})+{}", name_of(t), s.n, s.m, s.k, s.gap);
      for (bool flag : {false, true}) {
        registry.tests.push_back({fmt::format("{} forward{}", name, flag ? " bias" : ""),
                                  [=](Exec& e) { return forward(e, s, t, Activation::none, flag, false); }});
        registry.tests.push_back({fmt::format("{} dgrad{}", name, flag ? " +=" : ""),
                                  [=](Exec& e) { return backward_data(e, s, t, flag); }});
        registry.tests.push_back({fmt::format("{} wgrad{}", name, flag ? " +=" : ""),
                                  [=](Exec& e) { return backward_weight(e, s, t, flag); }});
      }
      registry.tests.push_back(
          {name + " forward +=", [=](Exec& e) { return forward(e, s, t, Activation::none, false, true); }});
    }
    for (const Shape& s : {Shape{7, 4, 33, 3}, Shape{64, 16, 96}, Shape{61, 8, 257, 7}})
      registry.tests.push_back(
          {fmt::format("linear.{} scaled ({}, {}, {})+{}", name_of(t), s.n, s.m, s.k, s.gap),
           [=](Exec& e) { return scaled(e, s, t); }});
    for (Activation f : {Activation::silu, Activation::gelu_tanh, Activation::gelu_erf})
      for (bool bias : {false, true})
        for (const Shape& s : {Shape{7, 33, 20, 3}, Shape{9, 40, 1024}})
          registry.tests.push_back({fmt::format("linear.{} activation {} k={}{}", name_of(t),
                                                static_cast<int>(f), s.k, bias ? " bias" : ""),
                                    [=](Exec& e) { return forward(e, s, t, f, bias, false); }});
  }
  for (DType t : {DType::f32, DType::bf16, DType::f16})
    for (Activation f : {Activation::silu, Activation::gelu_tanh})
      for (bool bias : {false, true})
        for (const Shape& s : {Shape{7, 33, 20, 3}, Shape{16, 32, 24}})
          registry.tests.push_back({fmt::format("linear.{} fused activation {} ({}, {}, {}){}", name_of(t),
                                                static_cast<int>(f), s.n, s.m, s.k, bias ? " bias" : ""),
                                    [=](Exec& e) { return fused_activation(e, s, t, f, bias); }});
  registry.properties.push_back({"linear of mixed types over blocks", mixed_types});
  registry.properties.push_back({"linear sums in a fixed order", packed_bits});
  registry.properties.push_back({"linear of few rows has the bits of many", few_rows_bits});
  registry.properties.push_back({"linear in blocks of packed operands", packed_blocks});
  registry.properties.push_back({"linear passes on what is not finite", non_finite});
  registry.properties.push_back({"linear of parts of matrices", parts_of_matrices});
  registry.properties.push_back({"linear rates", rates});
  registry.properties.push_back({"linear refuses shapes", wrong_arguments});
  for (const Shape& s : {Shape{3, 5, 4}, Shape{1, 2, 7}, Shape{6, 1, 3}})
    registry.grads.push_back(
        {fmt::format("linear ({}, {}, {})", s.n, s.m, s.k), [=](DType t) { return gradient(t, s); }});
}

}  // namespace nrl::ops_test
