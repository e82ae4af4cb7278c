#include "core/ops/linear.h"

#include <algorithm>

#include "core/ops/gemm/packed_sizes.h"
#include "core/ops/libraries.h"
#include "core/ops/linear/gpu.h"
#include "core/ops/shared/check.h"
#include "core/ops/shared/scratch.h"
#include "core/ops/traced.h"

namespace nrl::ops {
namespace {

void check_matrix(const char* op, const char* name, const Tensor& t, int64_t rows, int64_t columns,
                  bool only_f32) {
  NRL_CHECK((t.data || rows * columns == 0) && t.rank == 2 && t.dim(0) == rows && t.dim(1) == columns &&
                dense_rows(t) && (rows <= 1 || t.step(0) >= columns) &&
                (only_f32 ? t.dtype == DType::f32 : is_float(t)),
            "{}: {} is {}, wanted {}[{}, {}] with contiguous columns", op, name, describe(t),
            only_f32 ? "f32" : "f32, bf16 or f16 ", rows, columns);
}

/// An operand of a GEMM, (rows, columns) as stored: FP8 if the first one is.
void check_operand(const char* op, const char* name, const Tensor& t, int64_t rows, int64_t columns,
                   bool fp8) {
  if (!fp8) return check_matrix(op, name, t, rows, columns, false);
  NRL_CHECK(t.data && is_fp8(t) && t.rank == 2 && t.dim(0) == rows && t.dim(1) == columns && dense_rows(t) &&
                t.scales.kind != Scaling::none && t.scales.data,
            "{}: {} is {}, wanted FP8 [{}, {}] with scales", op, name, describe(t), rows, columns);
}

/// True if the activation must run as its own kernel because no library fuses it into the GEMM. On a GPU the
/// choice is noted.
template <class Arguments>
bool activation_kernel(const Exec& exec, const Arguments& a, const char* pass) {
  if (a.activation == Activation::none) return false;
  if (!exec.libraries) return true;
  const bool fused = gpu::fuses_activation(exec, a);
  note_choice(exec, {"gelu", pass,
                     fused ? "fused into the GEMM" : "a kernel of its own (cuBLASLt does not fuse it here)"});
  return !fused;
}

/// The two kernels of an op whose activation is not fused into the GEMM.
LinearForward without_activation(LinearForward a) {
  if (a.pre_activation) a.out = a.pre_activation;
  a.pre_activation = {};
  a.activation = Activation::none;
  return a;
}

LinearBackwardData without_activation(LinearBackwardData a) {
  a.pre_activation = {};
  a.activation = Activation::none;
  return a;
}

ActivationForward activation_of(const LinearForward& a) {
  return {.kind = a.activation, .x = a.pre_activation ? a.pre_activation : a.out, .out = a.out};
}

ActivationBackward activation_of(const LinearBackwardData& a) {
  return {.kind = a.activation, .dout = a.dx, .x = a.pre_activation, .dx = a.dx};
}

/// The cost of result = or += left * right, besides what the epilogue reads and writes.
Cost gemm_cost(const Exec& exec, const Tensor& left, const Tensor& right, const Tensor& result, int64_t inner,
               bool accumulate) {
  const double accumulated = accumulate ? bytes_of(result) : 0;
  return {.work = Work::gemm,
          .read = bytes_of(left, right) + accumulated,
          .written = bytes_of(result),
          .flops = linear_flops(result.dim(0), result.dim(1), inner),
          .operands = left.dtype,
          .tf32 = left.dtype == DType::f32 && exec.libraries && exec.libraries->tf32,
          .gemm = {result.dim(0), result.dim(1), inner},
          .epilogue = accumulated + bytes_of(result)};
}

}  // namespace

Cost cost(const Exec& exec, const LinearForward& a) {
  Cost c = gemm_cost(exec, a.x, a.weight, a.out, a.x.dim(1), a.accumulate);
  c.read += bytes_of(a.bias);
  c.written += bytes_of(a.pre_activation);
  c.epilogue += bytes_of(a.pre_activation);
  return c;
}

Cost cost(const Exec& exec, const LinearBackwardData& a) {
  Cost c = gemm_cost(exec, a.dout, a.weight, a.dx, a.dout.dim(1), a.accumulate);
  c.read += bytes_of(a.pre_activation);
  c.epilogue += bytes_of(a.pre_activation);
  return c;
}

Cost cost(const Exec& exec, const LinearBackwardWeight& a) {
  return gemm_cost(exec, a.dout, a.x, a.dweight, a.dout.dim(is_fp8(a.dout) ? 1 : 0), a.accumulate);
}

Cost cost(const Exec& exec, const ColumnSums& a) {
  return {
      .read = bytes_of(a.x) + (a.accumulate ? bytes_of(a.out) : 0),
      .written = bytes_of(a.out),
      .scratch = 2 * static_cast<double>(column_sum_groups(a.x.dim(1), exec.partials())) * bytes_of(a.out),
      .launches = 2};
}

void linear_forward(Exec& exec, const LinearForward& a) {
  constexpr const char* op = "linear_forward";
  if (exec.needed) {
    const bool two_kernels = activation_kernel(exec, a, "forward");
    const LinearForward gemm = two_kernels ? without_activation(a) : a;
    noted(exec, Kernel::linear_forward, gemm);
    if (exec.libraries) gpu::prepare(exec, gemm);
    if (two_kernels) noted(exec, Kernel::activation_forward, activation_of(a));
    return;
  }
  NRL_CHECK(a.x.rank == 2 && a.weight.rank == 2, "{}: x is {}, weight is {}", op, describe(a.x),
            describe(a.weight));
  const int64_t n = a.x.dim(0), k = a.x.dim(1), m = a.weight.dim(0);
  check_operand(op, "x", a.x, n, k, is_fp8(a.x));
  check_operand(op, "weight", a.weight, m, k, is_fp8(a.x));
  check_matrix(op, "out", a.out, n, m, false);
  NRL_CHECK(!a.bias || (is_float(a.bias) && is_vector(a.bias, m, a.bias.dtype)),
            "{}: bias is {}, wanted [{}]", op, describe(a.bias), m);
  NRL_CHECK(!a.accumulate || (!a.bias && a.activation == Activation::none),
            "{}: accumulating excludes a bias and an activation", op);
  NRL_CHECK(a.scale == 1 || (!a.accumulate && !a.bias && a.activation == Activation::none),
            "{}: a scale excludes accumulating, a bias and an activation", op);
  NRL_CHECK(!a.pre_activation || (a.activation != Activation::none && a.pre_activation.dtype == a.out.dtype),
            "{}: pre_activation is {}, out is {}", op, describe(a.pre_activation), describe(a.out));
  if (a.pre_activation) check_matrix(op, "pre_activation", a.pre_activation, n, m, false);
  // Where pre_activation is not wanted, the CPU's kernel calls the activation's itself, tile by tile.
  const bool two_passes = activation_kernel(exec, a, "forward") && (a.pre_activation || exec.libraries);
  const LinearForward gemm = two_passes ? without_activation(a) : a;
  {
    const trace::Range range = traced(exec, Kernel::linear_forward, gemm);
    if (n == 0 || m == 0) return;
    exec.kernels->linear_forward(exec, gemm);
  }
  // Two passes, so that recomputing from pre_activation gives bitwise identical results.
  if (!two_passes) return;
  const trace::Range range = traced(exec, Kernel::activation_forward, activation_of(a));
  exec.kernels->activation_forward(exec, activation_of(a));
}

void linear_backward_data(Exec& exec, const LinearBackwardData& a) {
  constexpr const char* op = "linear_backward_data";
  if (exec.needed) {
    const bool two_kernels = activation_kernel(exec, a, "backward");
    const LinearBackwardData gemm = two_kernels ? without_activation(a) : a;
    noted(exec, Kernel::linear_backward_data, gemm);
    if (exec.libraries) gpu::prepare(exec, gemm);
    if (two_kernels) noted(exec, Kernel::activation_backward, activation_of(a));
    return;
  }
  NRL_CHECK(a.dout.rank == 2 && a.weight.rank == 2, "{}: dout is {}, weight is {}", op, describe(a.dout),
            describe(a.weight));
  const bool fp8 = is_fp8(a.dout);
  const int64_t n = a.dout.dim(0), m = a.dout.dim(1), k = a.weight.dim(fp8 ? 0 : 1);
  check_operand(op, "dout", a.dout, n, m, fp8);
  check_operand(op, "weight", a.weight, fp8 ? k : m, fp8 ? m : k, fp8);
  check_matrix(op, "dx", a.dx, n, k, false);
  NRL_CHECK((a.activation != Activation::none) == static_cast<bool>(a.pre_activation) &&
                (!a.pre_activation || (!a.accumulate && a.pre_activation.dtype == a.dx.dtype)),
            "{}: pre_activation is {}, dx is {}", op, describe(a.pre_activation), describe(a.dx));
  NRL_CHECK(a.scale == 1 || (!a.accumulate && a.activation == Activation::none),
            "{}: a scale excludes accumulating and an activation", op);
  if (a.pre_activation) check_matrix(op, "pre_activation", a.pre_activation, n, k, false);
  const bool two_passes = activation_kernel(exec, a, "backward");
  const LinearBackwardData gemm = two_passes ? without_activation(a) : a;
  {
    const trace::Range range = traced(exec, Kernel::linear_backward_data, gemm);
    if (n == 0 || k == 0) return;
    exec.kernels->linear_backward_data(exec, gemm);
  }
  if (!two_passes) return;
  const trace::Range range = traced(exec, Kernel::activation_backward, activation_of(a));
  exec.kernels->activation_backward(exec, activation_of(a));
}

void linear_backward_weight(Exec& exec, const LinearBackwardWeight& a) {
  constexpr const char* op = "linear_backward_weight";
  // Not fused into the GEMM: the library's epilogue overwrites dbias, but it accumulates over microbatches.
  const auto bias_gradient = [&] {
    if (a.dbias) column_sums(exec, {.x = a.dout, .out = a.dbias, .accumulate = a.accumulate});
  };
  if (noted(exec, Kernel::linear_backward_weight, a)) {
    if (exec.libraries) gpu::prepare(exec, a);
    return bias_gradient();
  }
  NRL_CHECK(a.dout.rank == 2 && a.x.rank == 2, "{}: dout is {}, x is {}", op, describe(a.dout),
            describe(a.x));
  const bool fp8 = is_fp8(a.dout);
  const int64_t n = a.dout.dim(fp8 ? 1 : 0), m = a.dout.dim(fp8 ? 0 : 1), k = a.x.dim(fp8 ? 0 : 1);
  check_operand(op, "dout", a.dout, fp8 ? m : n, fp8 ? n : m, fp8);
  check_operand(op, "x", a.x, fp8 ? k : n, fp8 ? n : k, fp8);
  NRL_CHECK(!fp8 || !a.dbias, "{}: dbias of FP8", op);
  check_matrix(op, "dweight", a.dweight, m, k, true);
  bias_gradient();
  const trace::Range range = traced(exec, Kernel::linear_backward_weight, a);
  if (n == 0 && !a.accumulate && a.dweight.contiguous()) {
    zero(exec, {.x = a.dweight});
  } else if (n == 0) {
    for (int64_t j = 0; !a.accumulate && j < m; ++j) zero(exec, {.x = a.dweight.rows(j, 1)});
  } else if (m > 0 && k > 0) {
    exec.kernels->linear_backward_weight(exec, a);
  }
}

namespace {

/// Scratch bytes of the packed GEMMs of a layer whose operands have `element` bytes when packed.
size_t packed_workspace(int64_t n, int64_t m, int64_t k, int64_t element, bool rounded, int threads,
                        const packed::TileSize& tile = {}) {
  const auto bytes = [&](int64_t rows, int64_t columns, int64_t inner, bool rounded_result) {
    return packed::Blocks(rows, columns, inner, element, rounded_result, tile).bytes(threads);
  };
  return std::max({bytes(n, m, k, rounded), bytes(n, k, m, rounded), bytes(m, k, n, false)});
}

}  // namespace

size_t linear_workspace(int64_t n, int64_t m, int64_t k, DType dtype, int threads, Bf16Products products) {
  const size_t bias = scratch_bytes(m) + scratch_alignment;
  if (dtype == DType::f32) return bias + packed_workspace(n, m, k, 4, false, threads);
  if (size_of(dtype) == 1) {
    const int64_t rows = std::min(n, packed::decoded_rows), columns = std::min(m, packed::decoded_rows);
    return bias + scratch_bytes(rows * k) + scratch_bytes(columns * k) +
           packed::Blocks(rows, columns, k, 4, true).bytes(threads);
  }
  const size_t one_row = scratch_bytes(k) + scratch_bytes(m);
  // One operand may be f32, as the gradient of a router's logits: then both are packed in f32.
  size_t bytes = std::max(one_row, packed_workspace(n, m, k, 4, true, threads));
  if (dtype == DType::bf16 && multiplies_bf16(products))
    bytes = std::max(bytes,
                     packed_workspace(n, m, k, 2, true, threads,
                                      products == Bf16Products::amx ? packed::amx_tile : packed::TileSize{}));
  return bytes + bias;
}

void column_sums(Exec& exec, const ColumnSums& a) {
  if (noted(exec, Kernel::column_sums, a)) return;
  NRL_CHECK(a.x.rank == 2 && (a.x.data || a.x.numel() == 0) && is_float(a.x) && dense_rows(a.x),
            "column_sums: x is {}, wanted f32, bf16 or f16 (N, M) with contiguous columns", describe(a.x));
  const int64_t n = a.x.dim(0), m = a.x.dim(1);
  NRL_CHECK(is_vector(a.out, m, DType::f32) || m == 0, "column_sums: out is {}, x is {}", describe(a.out),
            describe(a.x));
  const trace::Range range = traced(exec, Kernel::column_sums, a);
  if (m > 0 && (n > 0 || !a.accumulate)) exec.kernels->column_sums(exec, a);
}

DType gemm_type(const Tensor& a, const Tensor& b, const Tensor& c) {
  DType type = DType::f32;
  for (const Tensor* t : {&a, &b, &c}) {
    if (is_fp8(*t) || t->dtype == DType::f16) return t->dtype;
    if (t->dtype == DType::bf16) type = DType::bf16;
  }
  return type;
}

namespace {

/// `columns`: of the output, whose sums a GPU keeps.
size_t workspace_of(const Exec& exec, int64_t n, int64_t m, int64_t k, int64_t columns, DType dtype) {
  return exec.on_gpu() ? gpu_linear_workspace(columns, exec.partials())
                       : linear_workspace(n, m, k, dtype, exec.threads, exec.kernels->bf16_products);
}

}  // namespace

size_t workspace(const Exec& exec, const LinearForward& a) {
  const int64_t n = a.out.dim(0), m = a.out.dim(1), k = a.x.dim(1);
  return workspace_of(exec, n, m, k, m, gemm_type(a.x, a.weight, a.out));
}

size_t workspace(const Exec& exec, const LinearBackwardData& a) {
  if (is_fp8(a.dout)) return workspace(exec, LinearForward{.x = a.dout, .weight = a.weight, .out = a.dx});
  const int64_t k = a.dx.dim(1);
  return workspace_of(exec, a.dx.dim(0), a.dout.dim(1), k, k, gemm_type(a.dout, a.weight, a.dx));
}

size_t workspace(const Exec& exec, const LinearBackwardWeight& a) {
  if (is_fp8(a.dout)) return workspace(exec, LinearForward{.x = a.dout, .weight = a.x, .out = a.dweight});
  const int64_t m = a.dweight.dim(0);
  return workspace_of(exec, a.dout.dim(0), m, a.dweight.dim(1), m, gemm_type(a.dout, a.x, a.dweight));
}

size_t workspace(const Exec& exec, const ColumnSums& a) {
  return exec.on_gpu() ? column_sums_workspace(a.x.dim(1), exec.partials()) : 0;
}

size_t column_sums_workspace(int64_t m, int partials) {
  // Not column_sum_groups(m, partials) * m, which does not grow with m.
  return scratch_bytes(std::max(int64_t{partials} * 256, m)) + scratch_alignment;
}

}  // namespace nrl::ops
