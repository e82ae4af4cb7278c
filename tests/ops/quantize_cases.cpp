#include <array>
#include <cmath>
#include <cstring>
#include <tuple>

#include "core/device/runtime.h"
#include "core/ops/grouped_linear.h"
#include "core/ops/linear.h"
#include "core/ops/quantize.h"
#include "core/ops/transfer.h"
#include "tests/ops/cases.h"
#include "tests/ops/reference/table.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;

/// Bytes in the memory of a Buffer, every one an element of unpacked(), so that a wrong one is far off.
struct Bytes {
  explicit Bytes(int64_t count) : count(count), memory(DType::i32, {(count + 3) / 4}) {}
  Buffer unpacked() const {
    Buffer out(DType::i32, {count});
    for (int64_t i = 0; i < count; ++i) {
      const auto word = static_cast<uint32_t>(static_cast<int32_t>(memory.get(i / 4)));
      out.set(i, word >> (8 * (i % 4)) & 0xff);
    }
    return out;
  }
  int64_t count;
  Buffer memory;
};

/// A matrix in FP8 with its scales.
struct Fp8Matrix {
  Fp8Matrix(DType format, Scaling kind, int64_t rows, int64_t columns)
      : codes(rows * columns), scales(scale_matrix(kind, rows, columns).bytes) {
    tensor = make_tensor(codes.memory.tensor().data, format, {rows, columns}, codes.memory.tensor().device);
    const ScaleMatrix steps = scale_matrix(kind, rows, columns);
    tensor.scales = {.data = scales.memory.tensor().data,
                     .kind = kind,
                     .row_step = steps.row_step,
                     .column_step = steps.column_step};
  }
  Bytes codes, scales;
  Tensor tensor;
};

/// Both copies of a matrix, or of several below each other.
struct Copies {
  Copies(DType format, Scaling kind, int64_t n, int64_t k, int64_t parts = 1)
      : row(format, kind, parts * n, k),
        column(format, kind, parts * k, n),
        given(DType::f32, {1}),
        amax(DType::f32, {1}) {
    if (kind != Scaling::tensor) return;
    for (Tensor* t : {&row.tensor, &column.tensor}) {
      t->scales.data = given.tensor().data;
      t->scales.amax = amax.tensor().ptr<float>();
    }
  }
  Fp8Matrix row, column;
  Buffer given, amax;
};

/// Normal numbers with blocks of zeros, of tiny and huge numbers, one number that dwarfs the others, and one
/// at the limit between two scales.
Buffer values(DType type, int64_t n, int64_t k, const std::string& name) {
  Buffer x = Buffer(type, {n, k}).normal(name);
  for (int64_t i = 0; i < n * k; ++i) {
    const int64_t block = i % k / 32 + 2 * (i / k / 32);
    if (block % 11 == 1) x.set(i, i % 3 == 0 ? -0.0 : 0.0);
    if (block % 11 == 2) x.set(i, x.get(i) * 1e-38);
    if (block % 11 == 3) x.set(i, x.get(i) * 1e37);
    if (block % 11 == 4 && i % 32 == 7) x.set(i, 1e4);
    if (block % 11 == 5 && i % 2 == 0) x.set(i, 1.75 * (i % 4 == 0 ? 1 : -1));
  }
  return x;
}

/// Types that are rounded to FP8.
std::vector<DType> sources(const Exec& e) {
  return e.libraries ? std::vector{DType::bf16} : std::vector{DType::f32, DType::bf16};
}
bool only_cpu(DType source) {
  return source == DType::f32;
}

Outputs copies(Exec& e, DType type, DType format, Scaling kind, int64_t n, int64_t k, bool row, bool column,
               int64_t parts = 1) {
  const Buffer x = values(type, parts * n, k, "x");
  Copies c(format, kind, n, k, parts);
  for (Fp8Matrix* m : {&c.row, &c.column}) m->scales.memory.fill(0x5a5a5a5a);  // what is padding is written
  c.given.set(0, 0.0123);
  c.amax.set(0, 1e-3);
  quantize(e, {.source = {x},
               .row = row ? c.row.tensor : Tensor{},
               .column = column ? c.column.tensor : Tensor{},
               .parts = parts});
  synchronize(e);
  return {{"row", c.row.codes.unpacked()},
          {"row scales", c.row.scales.unpacked()},
          {"column", c.column.codes.unpacked()},
          {"column scales", c.column.scales.unpacked()},
          {"amax", c.amax}};
}

/// Both gradients and the output of a linear layer with FP8 operands.
Outputs linear(Exec& e, DType type, DType gradient, Scaling input, Scaling weight, int64_t n, int64_t m,
               int64_t k, bool accumulate) {
  Copies x(DType::e4m3, input, n, k), w(DType::e4m3, weight, m, k), dy(gradient, input, n, m);
  for (Copies* c : {&x, &w, &dy}) c->given.set(0, 0.01);
  const Buffer bias = Buffer(DType::bf16, {m}).normal("bias");
  Exec reference{.kernels = &reference_kernels()};
  const auto fill = [&](Copies& c, const std::string& name, int64_t rows, int64_t columns) {
    const Buffer source = Buffer(DType::f32, {rows, columns}).normal(name);
    quantize(reference, {.source = {source}, .row = c.row.tensor, .column = c.column.tensor});
  };
  fill(x, "x", n, k);
  fill(w, "w", m, k);
  fill(dy, "dy", n, m);
  Buffer y = Buffer(type, {n, m}).normal("y"), dx = Buffer(type, {n, k}).normal("dx"),
         dw = Buffer(DType::f32, {m, k}).normal("dw");
  std::vector<std::byte> memory;
  // A Hopper, which the simulated GPU is, does not multiply mx32.
  Exec exact = e.libraries && input == Scaling::mx32 ? reference : e;
  if (!e.libraries) {
    const auto bytes = [&](int64_t a, int64_t b, int64_t c) {
      return linear_workspace(a, b, c, DType::e4m3, e.threads, e.kernels->bf16_products);
    };
    memory.resize(std::max({bytes(n, m, k), bytes(n, k, m), bytes(m, k, n)}));
    exact.workspace = {memory.data(), memory.size()};
  }
  linear_forward(exact, {.x = x.row.tensor,
                         .weight = w.row.tensor,
                         .bias = accumulate ? Tensor{} : bias.tensor(),
                         .out = y,
                         .accumulate = accumulate});
  linear_backward_data(exact, {dy.row.tensor, w.column.tensor, dx, accumulate});
  linear_backward_weight(
      exact, {.dout = dy.column.tensor, .x = x.column.tensor, .dweight = dw, .accumulate = accumulate});
  synchronize(e);
  return {{"y", y, k}, {"dx", dx, m}, {"dw", dw, n}};
}

Outputs scales(Exec& e, int64_t rows, int64_t n, DType format, bool most_recent, bool keep, int margin) {
  Buffer amax = Buffer(DType::f32, {rows, n}, 3).normal("amax"),
         scale = Buffer(DType::f32, {n}).normal("scale");
  for (int64_t i = 0; i < rows * n; ++i) {
    double v = std::fabs(amax.get(i));
    if (i % n % 7 == 1) v = 0;
    if (i % n % 7 == 2 && i / n == 0) v = i % 2 == 0 ? INFINITY : NAN;
    if (i % n % 7 == 3) v *= 1e-38;
    if (i % n % 7 == 4) v *= 1e38;
    amax.set(i, v);
  }
  update_scales(e, {amax, scale, format, margin, most_recent, keep});
  synchronize(e);
  return {{"amax", amax}, {"scale", scale}};
}

Outputs largest(Exec& e, DType type, int64_t n, int64_t k) {
  const Buffer x = values(type, n, k, "x");
  Buffer amax = Buffer(DType::f32, {1}).fill(0.5);
  largest_magnitude(e, {{x}, amax});
  synchronize(e);
  return {{"amax", amax}};
}

/// NaN is above infinity, and that above all numbers, wherever it is.
void largest_not_finite(Exec& e) {
  const int64_t n = 3, k = 48;
  for (const DType type : sources(e))
    for (const int64_t at : {int64_t{0}, int64_t{1}, int64_t{6}, n * k - 1}) {
      Buffer x = Buffer(type, {n, k}).normal("x");
      const auto amax = [&] {
        Buffer out(DType::f32, {1});
        largest_magnitude(e, {{x}, out});
        synchronize(e);
        return out.get(0);
      };
      expect(std::isfinite(amax()), "amax of numbers");
      x.set(at, -INFINITY);
      expect(amax() == INFINITY, fmt::format("amax of {} with infinity at {}", name_of(type), at));
      x.set(n * k / 2, NAN);
      expect(std::isnan(amax()), fmt::format("amax of {} with infinity at {} and NaN", name_of(type), at));
    }
}

/// Columns of a wider matrix, as attention has q, k and v; what lies beside them is larger.
Outputs part_of_columns(Exec& e, DType type, int64_t n, int64_t k) {
  Buffer wide = Buffer(type, {n, 3 * k}).fill(1e6);
  const Buffer x = Buffer(type, {n, k}).normal("x");
  for (int64_t i = 0; i < n * k; ++i) wide.set(i / k * 3 * k + k + i % k, x.get(i));
  const QuantizeSource source{wide.tensor().columns(k, k)};
  Copies c(DType::e4m3, Scaling::tensor, n, k), dense(DType::e4m3, Scaling::tensor, n, k);
  Buffer amax(DType::f32, {1});
  for (Copies* copies : {&c, &dense}) copies->given.set(0, 0.0123);
  quantize(e, {.source = source, .row = c.row.tensor});
  quantize(e, {.source = {x}, .row = dense.row.tensor});
  largest_magnitude(e, {source, amax});
  synchronize(e);
  const Buffer got = c.row.codes.unpacked(), want = dense.row.codes.unpacked();
  expect(same_bits(got, want), "codes of columns of a wider matrix");
  return {{"row", got}, {"amax of codes", c.amax}, {"amax", amax}};
}

/// The transposed copy of a row copy is the column copy.
Outputs transposed(Exec& e, DType format, int64_t n, int64_t k) {
  const Buffer x = values(DType::bf16, n, k, "x");
  Copies c(format, Scaling::tensor, n, k);
  c.given.set(0, 0.0123);
  Fp8Matrix out(format, Scaling::tensor, k, n);
  quantize(e, {.source = {x}, .row = c.row.tensor, .column = c.column.tensor});
  transpose(e, {.x = c.row.tensor, .out = out.tensor});
  synchronize(e);
  const Buffer got = out.codes.unpacked(), want = c.column.codes.unpacked();
  for (int64_t i = 0; i < n * k; ++i) expect(got.get(i) == want.get(i), fmt::format("code {}", i));
  return {{"out", got}};
}

int64_t blocks_of(int64_t rows, int64_t columns) {
  return scale_matrix(Scaling::block128, rows, columns).bytes / 4;
}

/// A part of a matrix of `rows` rows of k, from element `first` on.
Outputs part(Exec& e, DType type, DType format, int64_t rows, int64_t k, int64_t first, int64_t n) {
  const Buffer x = values(type, n / 16, 16, "x");
  const MatrixPart part{.x = make_tensor(x.tensor().data, type, {n}), .first = first, .columns = k};
  const int64_t blocks = blocks_of(rows, k);
  Buffer amax = Buffer(DType::f32, {blocks}).fill(0.5), scale(DType::f32, {blocks});
  for (int64_t i = 0; i < blocks; ++i)
    scale.set(i, i % 5 == 0 ? 0.0 : i % 5 == 1 ? NAN : std::ldexp(1.0, 118));
  Bytes codes(n);
  block_magnitudes(e, {part, amax});
  quantize_part(e, {part, scale, make_tensor(codes.memory.tensor().data, format, {n})});
  synchronize(e);
  return {{"amax", amax}, {"codes", codes.unpacked()}};
}

/// A matrix that is rounded part by part has the codes and scales of one that is rounded whole, and so has
/// its transpose.
void in_parts(Exec& e, DType type, DType format, bool finite) {
  const int64_t n = 272, k = 640, blocks = blocks_of(n, k);
  Buffer x = values(type, n, k, "x");
  if (!finite) x.set(5 * k + 130, NAN), x.set(200 * k + 600, INFINITY);
  Copies whole(format, Scaling::block128, n, k);
  Fp8Matrix row(format, Scaling::block128, n, k), column(format, Scaling::block128, k, n);
  quantize(e, {.source = {x}, .row = whole.row.tensor, .column = whole.column.tensor});
  const Tensor flat = make_tensor(x.tensor().data, type, {n * k}),
               codes = make_tensor(row.tensor.data, format, {n * k}),
               scale = make_tensor(row.tensor.scales.data, DType::f32, {blocks});
  Buffer amax(DType::f32, {1, blocks});
  const Tensor magnitudes = make_tensor(amax.tensor().data, DType::f32, {blocks});
  const int64_t cuts[] = {0, 64, 576, 5 * k + 192, 128 * k, 130 * k - 64, n * k};
  const auto each = [&](const auto& work) {
    for (size_t i = 0; i + 1 < std::size(cuts); ++i) {
      const int64_t first = cuts[i], count = cuts[i + 1] - first;
      work(MatrixPart{.x = flat.rows(first, count), .first = first, .columns = k}, codes.rows(first, count));
    }
  };
  each([&](const MatrixPart& part, const Tensor&) { block_magnitudes(e, {part, magnitudes}); });
  update_scales(e, {.amax = amax, .scale = scale, .format = format, .blocks = true});
  each([&](const MatrixPart& part, const Tensor& out) { quantize_part(e, {part, scale, out}); });
  transpose(e, {.x = row.tensor, .out = column.tensor});
  synchronize(e);
  for (const auto& [what, got, want] :
       {std::tuple("row", &row, &whole.row), {"column", &column, &whole.column}}) {
    expect(same_bits(got->codes.unpacked(), want->codes.unpacked()),
           fmt::format("codes of the {} copy", what));
    const bool rows = got == &row;
    for (int64_t i = 0; i < n; i += 128)
      for (int64_t j = 0; j < k; j += 128) {
        const Scales& s = got->tensor.scales;
        const auto at = [&](const Fp8Matrix& m) {
          return static_cast<const unsigned char*>(m.tensor.scales.data) +
                 scale_offset(s.kind, s.row_step, s.column_step, rows ? i : j, rows ? j : i);
        };
        expect(std::memcmp(at(*got), at(*want), 4) == 0, fmt::format("scale of the {} copy", what));
      }
  }
}

std::string list(const std::vector<int64_t>& numbers) {
  std::string out;
  for (const int64_t n : numbers) out += fmt::format("{}{}", out.empty() ? "" : "+", n);
  return out;
}

/// Rows of experts, of which the last ones belong to none.
struct Groups {
  explicit Groups(std::vector<int64_t> rows) : offsets(DType::i32, {static_cast<int64_t>(rows.size()) + 1}) {
    for (size_t g = 0; g < rows.size(); ++g)
      offsets.set(static_cast<int64_t>(g) + 1, static_cast<double>(used += rows[g]));
    total = used + 5;
  }
  int64_t count() const { return offsets.size() - 1; }
  /// Rows of a copy, which may have more than it needs.
  int64_t copied(Scaling kind) const {
    return grouped_rows(total, count(), row_unit(kind)) + 2 * row_unit(kind);
  }
  Buffer offsets;
  int64_t used = 0, total = 0;
};

/// A scale that is found from an amax as x is rounded is that of update_scales(), and the codes are those of
/// the scale. Rows in groups may be none at all.
void measured_scale(Exec& e, DType format, int margin, bool grouped, bool gradient) {
  const int64_t k = 144;
  for (const double largest : std::array<double, 6>{2.5, 1e-30, 3e38, 0.0, INFINITY, NAN})
    for (const bool rows : {true, false}) {
      if (!rows && !grouped) continue;
      const Groups groups(rows ? std::vector<int64_t>{3, 0, 130} : std::vector<int64_t>{0, 0});
      const int64_t n = grouped ? groups.total : 144, copied = grouped ? groups.copied(Scaling::tensor) : n;
      const Buffer x = values(DType::bf16, n, k, "x"), dout = values(DType::bf16, n, k, "dout");
      QuantizeSource source{.x = x};
      if (gradient) source.activation = Activation::silu, source.dout = dout;
      Buffer amax = Buffer(DType::f32, {1}).fill(largest), taken = Buffer(DType::f32, {1, 1}).fill(largest);
      Copies found(format, Scaling::tensor, copied, k), given(format, Scaling::tensor, copied, k);
      for (Copies* c : {&found, &given}) {
        c->given.set(0, 7);
        c->row.tensor.scales.amax = c->column.tensor.scales.amax = nullptr;
      }
      Quantize a{.source = source, .offsets = grouped ? groups.offsets.tensor() : Tensor{}};
      update_scales(e, {.amax = taken, .scale = given.given, .format = format, .margin = margin});
      a.row = given.row.tensor, a.column = given.column.tensor;
      quantize(e, a);
      a.row = found.row.tensor, a.column = found.column.tensor;
      a.measured = amax, a.margin = margin;
      quantize(e, a);
      synchronize(e);
      expect(same_bits(found.given, given.given),
             fmt::format("scale {} of amax {}", found.given.get(0), largest));
      expect(same_bits(found.row.codes.unpacked(), given.row.codes.unpacked()), "codes of the row copy");
      expect(same_bits(found.column.codes.unpacked(), given.column.codes.unpacked()),
             "codes of the column copy");
      expect(std::isnan(largest) ? std::isnan(amax.get(0))
                                 : amax.get(0) == Buffer(DType::f32, {1}).fill(largest).get(0),
             "amax after it was read");
    }
}

Outputs grouped_copies(Exec& e, DType type, DType format, Scaling kind, const std::vector<int64_t>& rows,
                       int64_t k, bool gated, bool row, bool column) {
  const Groups groups(rows);
  Buffer x = values(type, groups.total, gated ? 2 * k : k, "x");
  // What belongs to no expert is not read.
  for (int64_t i = groups.used * x.tensor().dim(1); i < x.size(); ++i) x.set(i, NAN);
  Copies c(format, kind, groups.copied(kind), k);
  Buffer largest(DType::f32, {1});
  c.given.set(0, 0.0123);
  const QuantizeSource source{
      .x = x, .activation = gated ? Activation::silu : Activation::none, .gated = gated};
  quantize(e, {.source = source,
               .row = row ? c.row.tensor : Tensor{},
               .column = column ? c.column.tensor : Tensor{},
               .offsets = groups.offsets});
  largest_magnitude(e, {.source = source, .amax = largest, .offsets = groups.offsets});
  synchronize(e);
  expect(kind != Scaling::tensor || c.amax.get(0) == largest.get(0), "amax of groups");
  return {{"row", c.row.codes.unpacked()},
          {"row scales", c.row.scales.unpacked()},
          {"column", c.column.codes.unpacked()},
          {"column scales", c.column.scales.unpacked()},
          {"amax", largest}};
}

/// Experts with FP8 operands.
Outputs grouped(Exec& device, DType type, Scaling input, Scaling weight, const std::vector<int64_t>& rows,
                int64_t m, int64_t k, bool accumulate) {
  Exec reference{.kernels = &reference_kernels()};
  Exec exact = device;
  // A Hopper refuses mx32, of which the kernel is for any GPU.
  if (input == Scaling::mx32) exact.device = nullptr;
  const Groups groups(rows);
  const int64_t n = groups.total, experts = groups.count(), copied = groups.copied(input);
  Copies x(DType::e4m3, input, copied, k), dy(DType::e5m2, input, copied, m);
  Fp8Matrix w(DType::e4m3, weight, experts * m, k), wt(DType::e4m3, weight, experts * k, m);
  Buffer scale = Buffer(DType::f32, {1}).fill(0.01);
  for (Copies* c : {&x, &dy}) c->given.set(0, 0.01);
  if (weight == Scaling::tensor) w.tensor.scales.data = wt.tensor.scales.data = scale.tensor().data;
  // Blocks of 32 numbers of a row or a column have scales that differ from their neighbors'.
  const auto normal = [&](int64_t count, int64_t columns, const std::string& name) {
    Buffer x = Buffer(DType::f32, {count, columns}).normal(name);
    if (has_scale_blocks(input))
      for (int64_t i = 0; i < x.size(); ++i)
        x.set(i, std::ldexp(x.get(i), static_cast<int>((i / columns / 32 + i % columns / 32) % 3) * 2));
    return x;
  };
  const Buffer xs = normal(n, k, "x"), dys = normal(n, m, "dy"), ws = normal(experts * m, k, "w");
  quantize(reference,
           {.source = {xs}, .row = x.row.tensor, .column = x.column.tensor, .offsets = groups.offsets});
  quantize(reference,
           {.source = {dys}, .row = dy.row.tensor, .column = dy.column.tensor, .offsets = groups.offsets});
  for (int64_t e = 0; e < experts; ++e)
    quantize(reference, {.source = {ws.tensor().rows(e * m, m)},
                         .row = w.tensor.rows(e * m, m),
                         .column = wt.tensor.rows(e * k, k)});
  Buffer y = Buffer(type, {n, m}).fill(3), dx = Buffer(type, {n, k}).fill(3),
         dw = Buffer(DType::f32, {experts * m, k}).normal("dw");
  std::vector<std::byte> memory;
  if (!device.libraries) {
    const auto bytes = [&](int64_t a, int64_t b, int64_t c) {
      return grouped_linear_workspace(a, b, c, DType::e4m3, exact.threads, exact.kernels->bf16_products);
    };
    const int64_t inner = n + row_unit(input);
    memory.resize(std::max({bytes(n, m, k), bytes(n, k, m), bytes(m, k, inner)}));
    exact.workspace = {memory.data(), memory.size()};
  }
  grouped_linear_forward(exact, {.x = x.row.tensor, .weight = w.tensor, .offsets = groups.offsets, .out = y});
  grouped_linear_backward_data(
      exact, {.dout = dy.row.tensor, .weight = wt.tensor, .offsets = groups.offsets, .dx = dx});
  grouped_linear_backward_weight(exact, {.dout = dy.column.tensor,
                                         .x = x.column.tensor,
                                         .offsets = groups.offsets,
                                         .dweight = dw,
                                         .accumulate = accumulate});
  synchronize(device);
  return {{"y", y, k}, {"dx", dx, m}, {"dw", dw, n}};
}

/// A GPU says before a run that its tensor cores do not multiply mx32 scales of experts.
void refused_experts(Exec& e) {
  if (!e.libraries || !e.device || e.device->properties().major >= 10) return;
  const Groups groups({128});
  const Fp8Matrix x(DType::e4m3, Scaling::mx32, groups.copied(Scaling::mx32), 128),
      w(DType::e4m3, Scaling::mx32, 128, 128);
  const Buffer out(DType::bf16, {groups.total, 128});
  KernelSet needed;
  Exec dry = e;
  dry.needed = &needed;
  std::string message;
  try {
    grouped_linear_forward(dry, {.x = x.tensor, .weight = w.tensor, .offsets = groups.offsets, .out = out});
  } catch (const Error& refused) {
    expect(refused.code() == Exit::unavailable, "exit code of a refusal");
    message = refused.what();
  }
  expect(message.find("scales of 32 numbers need compute capability 10.0") != std::string::npos,
         "refusal: " + message);
}

/// A GPU says so where it is given activations in f32.
void refused_f32(Exec& e) {
  if (!e.libraries) return;
  const auto message = [](const std::function<void()>& call) -> std::string {
    try {
      call();
    } catch (const Error& refused) {
      expect(refused.code() == Exit::internal, "exit code of a refusal");
      return refused.what();
    }
    return "";
  };
  const auto expect_refused = [&](const std::string& op, const std::function<void()>& call) {
    const std::string text = message(call);
    expect(text.find(op + ": ") != std::string::npos && text.find("bf16 only") != std::string::npos,
           fmt::format("refusal of {}: {}", op, text));
  };
  const int64_t n = 16, k = 32;
  const Buffer x(DType::f32, {n, k});
  Copies c(DType::e4m3, Scaling::tensor, n, k);
  Buffer amax(DType::f32, {1});
  expect_refused("quantize", [&] { quantize(e, {.source = {x}, .row = c.row.tensor}); });
  expect_refused("largest_magnitude", [&] { largest_magnitude(e, {.source = {x}, .amax = amax}); });
  const Groups groups({n});
  Copies rows(DType::e4m3, Scaling::tensor, groups.copied(Scaling::tensor), k),
      weight(DType::e4m3, Scaling::tensor, n, k);
  for (Copies* matrix : {&rows, &weight}) matrix->given.set(0, 1);
  Buffer out(DType::f32, {groups.total, n});
  expect_refused("grouped_linear_forward", [&] {
    grouped_linear_forward(
        e, {.x = rows.row.tensor, .weight = weight.row.tensor, .offsets = groups.offsets, .out = out});
  });
}

/// An activation that is computed as it is rounded gives the codes of one that is stored in f32, but for
/// numbers in the middle of two, where the last bit of the activation decides.
void fused_activation(Exec& e, DType type, Activation kind, bool gated, Scaling scaling) {
  const int64_t n = 144, k = 272;
  const Buffer x = Buffer(type, {n, gated ? 2 * k : k}).normal("x");
  Buffer input(DType::f32, {n, gated ? 2 * k : k}), act(DType::f32, {n, k});
  for (int64_t i = 0; i < x.size(); ++i) input.set(i, x.get(i));
  Copies fused(DType::e4m3, scaling, n, k), apart(DType::e4m3, scaling, n, k);
  Buffer amax(DType::f32, {1}), want_amax(DType::f32, {1});
  for (Copies* c : {&fused, &apart}) c->given.set(0, 0.01);
  activation_forward(e, {.kind = kind, .gated = gated, .x = input, .out = act});
  synchronize(e);
  Exec reference{.kernels = &reference_kernels()};  // a GPU does not round f32
  quantize(reference, {.source = {act}, .row = apart.row.tensor, .column = apart.column.tensor});
  largest_magnitude(reference, {{act}, want_amax});
  const QuantizeSource source{.x = x, .activation = kind, .gated = gated};
  quantize(e, {.source = source, .row = fused.row.tensor, .column = fused.column.tensor});
  largest_magnitude(e, {source, amax});
  synchronize(e);
  int64_t different = 0;
  for (const auto& [a, b] : {std::pair{fused.row.codes.unpacked(), apart.row.codes.unpacked()},
                             {fused.column.codes.unpacked(), apart.column.codes.unpacked()}})
    for (int64_t i = 0; i < n * k; ++i) {
      const double off = std::fabs(a.get(i) - b.get(i));
      expect(off <= 1, fmt::format("code {}: {} and {}", i, a.get(i), b.get(i)));
      different += off > 0;
    }
  expect(different <= n * k / 1000, fmt::format("{} codes differ", different));
  expect(std::fabs(amax.get(0) - want_amax.get(0)) <= 1e-5 * want_amax.get(0), "amax");
}

/// The gradient of an activation that is computed as it is rounded gives the codes, scales and largest
/// magnitude of one that is stored, also of rows in groups; those of the reference but for numbers in the
/// middle of two, where the last bit of the gradient decides.
void fused_gradient(Exec& e, DType type, Activation kind, bool gated, Scaling scaling,
                    const std::vector<int64_t>& rows) {
  const int64_t width = has_scale_blocks(scaling) ? 256 : 144, k = gated ? 2 * width : width;
  const Groups groups(rows);
  const bool grouped = rows.size() > 1;
  const int64_t n = grouped ? groups.total : rows[0], copied = grouped ? groups.copied(scaling) : n;
  // Columns of wider matrices, with numbers beside them that would be noticed.
  Buffer wide_x = Buffer(type, {n, k + 32}).fill(1e6), wide_dout = Buffer(type, {n, width + 16}).fill(1e6);
  const Tensor x = wide_x.tensor().columns(16, k), dout = wide_dout.tensor().columns(16, width);
  const auto fill = [&](Buffer& wide, const Buffer& from) {
    const int64_t columns = from.tensor().dim(1), step = wide.tensor().dim(1);
    for (int64_t i = 0; i < from.size(); ++i)
      wide.set(i / columns * step + 16 + i % columns, i / columns < groups.used ? from.get(i) : NAN);
  };
  fill(wide_x, Buffer(type, {n, k}).normal("x", 2.0));
  const auto rounded = [&](Exec& exec, bool fused) {
    Buffer dx(type, {n, k}), amax(DType::f32, {1});
    Copies c(DType::e5m2, scaling, copied, k);
    c.given.set(0, 0.001);
    QuantizeSource source{.x = dx};
    if (fused)
      source = {.x = x, .activation = kind, .gated = gated, .dout = dout};
    else
      activation_backward(exec, {.kind = kind, .gated = gated, .dout = dout, .x = x, .dx = dx});
    const Tensor offsets = grouped ? groups.offsets.tensor() : Tensor{};
    quantize(exec, {.source = source, .row = c.row.tensor, .column = c.column.tensor, .offsets = offsets});
    largest_magnitude(exec, {.source = source, .amax = amax, .offsets = offsets});
    synchronize(exec);
    expect(scaling != Scaling::tensor || c.amax.get(0) == amax.get(0), "amax of codes");
    return std::vector<Buffer>{c.row.codes.unpacked(), c.column.codes.unpacked(), c.row.scales.unpacked(),
                               c.column.scales.unpacked(), amax};
  };
  // With numbers of all sizes, those that are subnormal in bf16 among them.
  fill(wide_dout, values(type, n, width, "dout"));
  std::vector<Buffer> apart = rounded(e, false), fused = rounded(e, true);
  for (size_t i = 0; i < fused.size(); ++i)
    expect(same_bits(fused[i], apart[i]), fmt::format("result {} differs from the stored one's", i));
  if (scaling != Scaling::tensor) return;  // all scalings round the same numbers
  fill(wide_dout, Buffer(type, {n, width}).normal("dout"));
  Exec reference{.kernels = &reference_kernels()};
  fused = rounded(e, true);
  const std::vector<Buffer> want = rounded(reference, true);
  int64_t different = 0;
  // The error of erf is absolute: numbers below 4e-6 may have any such code.
  const auto place = [](double code) { return code < 128 ? code : 128 - code; };
  for (size_t copy = 0; copy < 2; ++copy)
    for (int64_t i = 0; i < fused[copy].size(); ++i) {
      const double a = place(fused[copy].get(i)), b = place(want[copy].get(i)), off = std::fabs(a - b);
      expect(off <= 1 || std::max(std::fabs(a), std::fabs(b)) <= 24,
             fmt::format("code {}: {} and {}", i, a, b));
      different += off > 0;
    }
  expect(different <= n * k / 50, fmt::format("{} codes differ", different));
}

/// A norm that is computed as it is rounded gives the codes and scales of one that is stored; those of the
/// reference but for numbers in the middle of two, where the last bit of the norm decides.
void fused_norm(Exec& e, DType type, DType weights, NormKind kind, bool with_bias, Scaling scaling) {
  const int64_t n = 144, k = 272;
  const bool layer = kind == NormKind::layer;
  const float offset = layer ? 0.0f : 0.75f;
  const Buffer x = Buffer(type, {n, k}).normal("x", 2.0, 0.5),
               weight = Buffer(weights, {k}).normal("weight", 0.3, 1.0),
               bias = Buffer(weights, {k}).normal("bias");
  const auto rounded = [&](Exec& exec, bool fused) {
    Buffer out(type, {n, k}), mean(DType::f32, {n}), rstd(DType::f32, {n});
    Copies c(DType::e4m3, scaling, n, k);
    c.given.set(0, 0.01);
    const Tensor biases = with_bias ? bias.tensor() : Tensor{}, means = layer ? mean.tensor() : Tensor{};
    norm_forward(exec, {.kind = kind,
                        .x = x,
                        .weight = weight,
                        .weight_offset = offset,
                        .bias = biases,
                        .out = fused ? Tensor{} : out.tensor(),
                        .mean = means,
                        .rstd = rstd});
    QuantizeSource source{.x = fused ? x : out};
    if (fused)
      source.norm = {.weight = weight, .weight_offset = offset, .bias = biases, .mean = means, .rstd = rstd};
    quantize(exec, {.source = source, .row = c.row.tensor, .column = c.column.tensor});
    synchronize(exec);
    return std::vector<Buffer>{c.row.codes.unpacked(), c.column.codes.unpacked(), c.row.scales.unpacked(),
                               c.column.scales.unpacked(), c.amax};
  };
  Exec reference{.kernels = &reference_kernels()};
  const std::vector<Buffer> apart = rounded(e, false), fused = rounded(e, true),
                            want = rounded(reference, true);
  for (size_t i = 0; i < fused.size(); ++i)
    expect(same_bits(fused[i], apart[i]), fmt::format("result {} differs from the stored one's", i));
  int64_t different = 0;
  for (size_t copy = 0; copy < 2; ++copy)
    for (int64_t i = 0; i < n * k; ++i) {
      const double off = std::fabs(fused[copy].get(i) - want[copy].get(i));
      expect(off <= 1 || off == 128, fmt::format("code {}", i));  // +0 and -0
      different += off > 0;
    }
  expect(different <= n * k / 200, fmt::format("{} codes differ", different));
}

/// NaN and infinity spoil their block, or in a scaled tensor themselves, and are seen in amax.
void non_finite(Exec& e) {
  const int64_t n = 256, k = 256, at = 5 * k + 130;
  const DType type = sources(e).front();
  for (const Scaling kind : {Scaling::tensor, Scaling::row128, Scaling::block128, Scaling::mx32})
    for (const double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
      Buffer x = Buffer(type, {n, k}).normal("x");
      x.set(at, bad);
      Copies c(DType::e4m3, kind, n, k);
      c.given.set(0, 1.0);
      quantize(e, {.source = {x}, .row = c.row.tensor, .column = c.column.tensor});
      synchronize(e);
      const Fp8Matrix& row = c.row;
      const Buffer codes = row.codes.unpacked();
      const auto* memory = static_cast<const unsigned char*>(row.tensor.scales.data);
      for (int64_t i = 0; i < n * k; ++i) {
        const int64_t r = i / k, j = i % k;
        const Scales& s = row.tensor.scales;
        float scale = 0;
        const int64_t offset = scale_offset(kind, s.row_step, s.column_step, r, j);
        if (kind != Scaling::mx32) std::memcpy(&scale, memory + offset, sizeof scale);
        const bool nan = (static_cast<int>(codes.get(i)) & 0x7f) == 0x7f ||
                         (kind == Scaling::mx32 ? memory[offset] == 255 : std::isnan(scale));
        const bool spoiled = kind == Scaling::tensor     ? i == at
                             : kind == Scaling::row128   ? r == 5 && j >= 128
                             : kind == Scaling::block128 ? r < 128 && j >= 128
                                                         : r == 5 && j >= 128 && j < 160;
        expect(nan == spoiled, fmt::format("{} scales: element ({}, {})", name_of(kind), r, j));
      }
      if (kind == Scaling::tensor)
        expect(std::isnan(bad) ? std::isnan(c.amax.get(0)) : std::isinf(c.amax.get(0)), "amax");
    }
}

}  // namespace

NRL_OP_CASES(quantize) {
  for (const Scaling kind : {Scaling::tensor, Scaling::row128, Scaling::block128, Scaling::mx32})
    for (const DType type : {DType::f32, DType::bf16})
      for (const DType format : {DType::e4m3, DType::e5m2})
        for (const auto& [n, k] : {std::pair<int64_t, int64_t>{16, 16}, {48, 160}, {272, 400}})
          for (const auto& [row, column] : {std::pair{true, true}, {true, false}, {false, true}}) {
            if (n > 48 && !(row && column)) continue;
            registry.tests.push_back(
                {fmt::format("quantize {} {} {} ({}, {}){}{}", name_of(type), name_of(format), name_of(kind),
                             n, k, row ? " row" : "", column ? " column" : ""),
                 [=](Exec& e) { return copies(e, type, format, kind, n, k, row, column); }, true,
                 only_cpu(type)});
          }
  for (const Scaling kind : {Scaling::tensor, Scaling::row128, Scaling::block128, Scaling::mx32})
    for (const bool row : {false, true}) {
      const int64_t n = kind == Scaling::tensor ? 144 : 256, k = kind == Scaling::tensor ? 48 : 128;
      registry.tests.push_back(
          {fmt::format("quantize parts {}{}", name_of(kind), row ? "" : " column"),
           [=](Exec& e) { return copies(e, DType::bf16, DType::e4m3, kind, n, k, row, true, 3); }, true});
    }
  for (const DType format : {DType::e4m3, DType::e5m2})
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{16, 16}, {48, 160}, {272, 400}})
      registry.tests.push_back({fmt::format("transpose {} ({}, {})", name_of(format), n, k),
                                [=, n = n, k = k](Exec& e) { return transposed(e, format, n, k); }, true});
  for (const DType type : {DType::f32, DType::bf16})
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{16, 16}, {37, 160}})
      registry.tests.push_back({fmt::format("quantize columns {} ({}, {})", name_of(type), n, k),
                                [=](Exec& e) { return part_of_columns(e, type, n, k); }, true,
                                only_cpu(type)});
  for (const DType type : {DType::f32, DType::bf16})
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{1, 16}, {33, 4112}, {37, 48}})
      registry.tests.push_back({fmt::format("largest_magnitude {} ({}, {})", name_of(type), n, k),
                                [=](Exec& e) { return largest(e, type, n, k); }, true, only_cpu(type)});
  for (const DType type : {DType::f32, DType::bf16})
    for (const DType gradient : {DType::e4m3, DType::e5m2}) {
      // Pairs of all three suffice: the products are slow where they are emulated.
      const bool accumulate = (type == DType::f32) == (gradient == DType::e5m2);
      for (const auto& [input, weight] : {std::pair{Scaling::tensor, Scaling::tensor},
                                          {Scaling::row128, Scaling::block128},
                                          {Scaling::mx32, Scaling::mx32}})
        registry.tests.push_back({fmt::format("linear fp8 {} dy {} {}{}", name_of(type), name_of(gradient),
                                              name_of(input), accumulate ? " +=" : ""),
                                  [=, in = input, w = weight](Exec& e) {
                                    return linear(e, type, gradient, in, w, 128, 256, 384, accumulate);
                                  },
                                  true, only_cpu(type)});
    }
  for (const Scaling kind : {Scaling::tensor, Scaling::row128, Scaling::mx32})
    for (const std::vector<int64_t>& rows :
         {std::vector<int64_t>{7}, {0, 33, 0, 1, 130}, {16, 128, 3}, {140, 140}}) {
      for (const DType type : {DType::f32, DType::bf16})
        for (const bool gated : {false, true})
          for (const auto& [row, column] : {std::pair{true, true}, {true, false}, {false, true}})
            registry.tests.push_back(
                {fmt::format("quantize groups {} {} of {}{}{}{}", name_of(type), name_of(kind), list(rows),
                             gated ? " gated" : "", row ? " row" : "", column ? " column" : ""),
                 [=, r = row, c = column](Exec& e) {
                   return grouped_copies(e, type, gated ? DType::e5m2 : DType::e4m3, kind, rows, 144, gated,
                                         r, c);
                 },
                 true, only_cpu(type)});
      for (const DType type : {DType::f32, DType::bf16})
        registry.tests.push_back(
            {fmt::format("grouped_linear fp8 {} {} of {}", name_of(type), name_of(kind), list(rows)),
             [=](Exec& e) {
               return grouped(e, type, kind, kind == Scaling::row128 ? Scaling::block128 : kind, rows,
                              kind == Scaling::tensor ? 48 : 128, kind == Scaling::tensor ? 80 : 256,
                              type == DType::f32);
             },
             true, only_cpu(type)});
    }
  for (const bool most_recent : {false, true})
    for (const bool keep : {false, true})
      for (const int64_t rows : {1, 5, 37})
        registry.tests.push_back({fmt::format("update_scales ({}, 300){}{}", rows,
                                              most_recent ? " most recent" : "", keep ? " keep" : ""),
                                  [=](Exec& e) {
                                    return scales(e, rows, 300, keep ? DType::e4m3 : DType::e5m2, most_recent,
                                                  keep, keep ? 2 : 0);
                                  },
                                  true});
  for (const DType type : {DType::f32, DType::bf16})
    for (const DType format : {DType::e4m3, DType::e5m2}) {
      for (const auto& [rows, k, first, n] :
           {std::tuple<int64_t, int64_t, int64_t, int64_t>{1, 128, 16, 32}, {130, 384, 64, 384 * 129 + 192}})
        registry.tests.push_back(
            {fmt::format("quantize part {} {} of ({}, {})", name_of(type), name_of(format), rows, k),
             [=, rows = rows, k = k, first = first, n = n](Exec& e) {
               return part(e, type, format, rows, k, first, n);
             },
             true});
      for (const bool finite : {true, false})
        registry.properties.push_back({fmt::format("quantize.in_parts {} {}{}", name_of(type),
                                                   name_of(format), finite ? "" : " not finite"),
                                       [=](Exec& e) { in_parts(e, type, format, finite); },
                                       !(type == DType::bf16 && format == DType::e4m3), only_cpu(type)});
    }
  for (const DType format : {DType::e4m3, DType::e5m2})
    for (const bool grouped : {false, true})
      for (const bool gradient : {false, true})
        registry.properties.push_back(
            {fmt::format("quantize.measured {}{}{}", name_of(format), grouped ? " groups" : "",
                         gradient ? " gradient" : ""),
             [=](Exec& e) { measured_scale(e, format, grouped ? 3 : -1, grouped, gradient); },
             format == DType::e4m3});
  registry.properties.push_back({"quantize.largest_not_finite", largest_not_finite});
  registry.properties.push_back({"quantize.non_finite", non_finite});
  registry.properties.push_back({"grouped_linear.refused_fp8", refused_experts});
  registry.properties.push_back({"quantize.refused_f32", refused_f32});
  for (const DType type : {DType::f32, DType::bf16})
    for (const NormKind kind : {NormKind::rms, NormKind::layer})
      for (const bool bias : {false, true}) {
        if (bias && kind == NormKind::rms) continue;
        for (const Scaling scaling : {Scaling::tensor, Scaling::row128, Scaling::mx32})
          registry.properties.push_back(
              {fmt::format("quantize.fused_norm {} {}{} {}", name_of(type),
                           kind == NormKind::rms ? "rms" : "layer", bias ? " bias" : "", name_of(scaling)),
               [=](Exec& e) { fused_norm(e, type, bias ? DType::f32 : type, kind, bias, scaling); },
               !(type == DType::bf16 && kind == NormKind::rms), only_cpu(type)});
      }
  for (const DType type : {DType::f32, DType::bf16})
    for (const bool gated : {false, true})
      for (const auto& [kind, activation] : {std::pair{Activation::silu, "silu"},
                                             {Activation::gelu_tanh, "gelu_tanh"},
                                             {Activation::gelu_erf, "gelu_erf"}})
        for (const Scaling scaling : {Scaling::tensor, Scaling::row128, Scaling::block128, Scaling::mx32})
          for (const std::vector<int64_t>& rows : {std::vector<int64_t>{144}, {0, 33, 130}}) {
            const bool usual = gated && kind == Activation::silu;
            if (!usual && (scaling != Scaling::tensor || (type == DType::f32) == (rows.size() > 1))) continue;
            registry.properties.push_back(
                {fmt::format("quantize.fused_gradient {} {}{} {} of {}", name_of(type), activation,
                             gated ? " gated" : "", name_of(scaling), list(rows)),
                 [=, a = kind](Exec& e) { fused_gradient(e, type, a, gated, scaling, rows); },
                 !(type == DType::bf16 && usual), only_cpu(type)});
          }
  for (const DType type : {DType::f32, DType::bf16})
    for (const bool gated : {false, true})
      for (const auto& [kind, activation] : {std::pair{Activation::silu, "silu"},
                                             {Activation::gelu_tanh, "gelu_tanh"},
                                             {Activation::gelu_erf, "gelu_erf"}})
        for (const Scaling scaling : {Scaling::tensor, Scaling::row128, Scaling::mx32})
          registry.properties.push_back(
              {fmt::format("quantize.fused_activation {} {}{} {}", name_of(type), activation,
                           gated ? " gated" : "", name_of(scaling)),
               [=, a = kind](Exec& e) { fused_activation(e, type, a, gated, scaling); },
               !(type == DType::bf16 && gated && kind == Activation::silu), only_cpu(type)});
}

}  // namespace nrl::ops_test
