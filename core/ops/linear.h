#pragma once
// Linear layers: y = x W^T + b, and their two backward parts, which are separate calls so that schedules can
// move the weight gradient away from the critical path.
//
// x (N, K), weight (M, K) = [out, in], y (N, M). Rows may be strided, columns are contiguous. x, weight, y
// are f32, bf16 or f16; 16 bits are storage: sums are accumulated in f32 and rounded once at the end.
//
// Both operands may be FP8 with scales (quantize.h), each in the copy whose columns the GEMM sums over: the
// row copies of x and weight forward; the row copy of dout and the column copy of weight for dx; the column
// copies of dout and x for dweight. A CPU upcasts them to f32, scales included.

#include "core/ops/activation.h"
#include "core/ops/exec.h"

namespace nrl::ops {

/// How a CPU multiplies bf16 operands.
enum class Bf16Products : uint8_t {
  upcast,  ///< upcast to f32 while operands are packed (gemm/packed.h)
  native,  ///< dot products of bf16 that are added in f32 (AVX512_BF16)
  amx,     ///< products of tiles of bf16 that are added in f32 (gemm/packed_amx.h)
};
/// True if bf16 operands are multiplied as they are.
constexpr bool multiplies_bf16(Bf16Products products) {
  return products >= Bf16Products::native;
}

/// out = act(x W^T + bias), or out += x W^T (accumulate; then neither bias nor activation), or out = scale x
/// W^T (then nothing else).
struct LinearForward {
  Tensor x;                                  ///< (N, K)
  Tensor weight;                             ///< (M, K)
  Tensor bias = {};                          ///< optional (M)
  Tensor out;                                ///< (N, M)
  Activation activation = Activation::none;  ///< fused into the epilogue; none, silu, gelu_tanh or gelu_erf
  bool accumulate = false;
  Tensor pre_activation = {};  ///< optional (N, M): x W^T + bias, the input of the activation
  float scale = 1;
};

/// dx = dout W, or dx += dout W, or dx = scale dout W. With an activation (then not accumulate) dx is the
/// gradient of the activation's input: (dout W) * act'(pre_activation).
struct LinearBackwardData {
  Tensor dout;    ///< (N, M)
  Tensor weight;  ///< (M, K); in FP8 (K, M)
  Tensor dx;      ///< (N, K)
  bool accumulate = false;
  Activation activation = Activation::none;
  Tensor pre_activation = {};  ///< (N, K), with an activation
  float scale = 1;
};

/// dweight = dout^T x (accumulate: +=), dbias = column sums of dout (accumulate: +=).
struct LinearBackwardWeight {
  Tensor dout;        ///< (N, M); in FP8 (M, N)
  Tensor x;           ///< (N, K); in FP8 (K, N)
  Tensor dweight;     ///< (M, K) f32
  Tensor dbias = {};  ///< optional (M) f32; not with FP8: use column_sums of the original dout
  bool accumulate = true;
};

/// out[m] = or += (accumulate) the sum over rows of x: the gradient of a bias. Rows of x may be strided. The
/// order of additions depends on the shape, and on a GPU on Exec::reduction_blocks.
struct ColumnSums {
  Tensor x;    ///< (N, M) f32, bf16 or f16
  Tensor out;  ///< (M) f32
  bool accumulate = true;
};
void column_sums(Exec& exec, const ColumnSums& a);
Cost cost(const Exec& exec, const ColumnSums& a);
size_t workspace(const Exec& exec, const ColumnSums& a);
/// The most groups of rows whose sums column_sums stores on a GPU: with tiles of 256 columns, `partials`
/// blocks.
constexpr int64_t column_sum_groups(int64_t m, int partials) {
  const int64_t groups = partials / ((m - 1) / 256 + 1);
  return groups > 1 ? groups : 1;
}
/// Scratch bytes of column_sums on a GPU for up to m columns.
size_t column_sums_workspace(int64_t m, int partials);

void linear_forward(Exec& exec, const LinearForward& a);
void linear_backward_data(Exec& exec, const LinearBackwardData& a);
void linear_backward_weight(Exec& exec, const LinearBackwardWeight& a);
/// The cost of the GEMM and what is fused into it. Other activations and dbias are separate calls.
Cost cost(const Exec& exec, const LinearForward& a);
Cost cost(const Exec& exec, const LinearBackwardData& a);
Cost cost(const Exec& exec, const LinearBackwardWeight& a);
size_t workspace(const Exec& exec, const LinearForward& a);
size_t workspace(const Exec& exec, const LinearBackwardData& a);
size_t workspace(const Exec& exec, const LinearBackwardWeight& a);

/// Floating-point operations of any of the three.
constexpr double linear_flops(int64_t n, int64_t m, int64_t k) {
  return 2.0 * static_cast<double>(n) * static_cast<double>(m) * static_cast<double>(k);
}

/// Scratch bytes of any of the three and of column_sums on a GPU, for matrices of at most `widest` columns.
size_t gpu_linear_workspace(int64_t widest, int partials);

/// The type of a GEMM with these operands for linear_workspace(): f32 if all are, else the smallest.
DType gemm_type(const Tensor& a, const Tensor& b, const Tensor& c);
/// Scratch bytes that any of the three needs for these sizes on a CPU (f32 copies of bf16 and FP8 operands
/// included). The gradients of FP8 operands are GEMMs like the forward one, of sizes (n, k, m) and (m, k, n).
/// `products`: KernelTable::bf16_products.
size_t linear_workspace(int64_t n, int64_t m, int64_t k, DType dtype, int threads, Bf16Products products);

}  // namespace nrl::ops
