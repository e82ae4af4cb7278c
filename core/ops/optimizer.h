#pragma once
// Optimizer updates and the norms and conversions around them, on flat buffers.

#include <array>
#include <span>
#include <vector>

#include "core/ops/exec.h"

namespace nrl::ops {

/// Hyperparameters that may differ between the elements of one update.
struct AdamWRates {
  float weight_decay = 0;
  float lr_scale = 1;
};
inline constexpr int adamw_rates = 4;

/// AdamW (Loshchilov & Hutter 2019) over n elements in one pass:
///   g = grad * grad_scale;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
///   p = p - lr * weight_decay * p - lr * (m / (1 - b1^step)) / (sqrt(v / (1 - b2^step)) + eps)
/// which is torch.optim.AdamW's order (decay first, then the step). lr here is the step's learning rate times
/// the lr_scale of the elements' rates.
///
/// The state may be in formats of fewer bits. It is read as fp32, updated in fp32 and rounded once when it is
/// written, up or down at random with probabilities that make the mean exact: to nearest, a running mean
/// would stay where it is as soon as its changes are below half a unit in the last place. The random bits are
/// a hash of the element's gradient, its new state and the step, so that no layout of the elements changes
/// them.
///   bf16: as is.
///   f16, e4m3: moment_block neighbors share a scale, a power of two (E8M0: 2^(byte - 127), 0: all are zero),
///   the smallest for which the block's largest number is at most 1.75 * 2^15 or 448. An exp_avg_sq that is
///   not zero never becomes zero, which would make the step of its weight as large as eps permits.
///
/// With `remainder` there is no `param`: the master weight is param_bf16 and the lower half of the bits of
/// the fp32 number, which give it back exactly. A copy in bf16 is rounded to nearest, halves away from zero,
/// also without remainders, so that both are the same training; one in f16 to nearest even, and it has no
/// remainders. Without `param` and `remainder` there are no master weights: param_bf16 in bf16 is updated,
/// and rounded at random as the state is.
///
/// With `chunks` one call updates many tensors of flat buffers (multi-tensor): then n is a buffer's own
/// length. With `scalars` the learning rate, grad_scale and step are read from the device (StepScalar,
/// step.h), and a skipped step changes nothing.
struct AdamW {
  Tensor param;                ///< (n) f32 master weights; empty with `remainder`, or if there are none
  Tensor grad;                 ///< (n) f32 or bf16, only read
  Tensor exp_avg, exp_avg_sq;  ///< (n) f32, bf16, f16 or e4m3
  Tensor param_bf16 = {};      ///< optional (n) copy of the updated weights in bf16 or f16
  Tensor remainder = {};       ///< optional (n) u16, of the elements of the state
  /// (moment_blocks(n)) u8 for f16 and e4m3, else empty
  Tensor exp_avg_scales = {}, exp_avg_sq_scales = {};
  float lr = 0, beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f;
  std::array<AdamWRates, adamw_rates> rates = {};  ///< without chunks the first one counts
  float grad_scale = 1;                            ///< unscale * clip factor
  int64_t step = 1;                                ///< 1 for the first update
  /// optional (C, 4) i64: first element in the flat buffers (grad, param_bf16; param too without param_bf16),
  /// first element in the state buffers (exp_avg, exp_avg_sq, remainder; param too with param_bf16), elements
  /// (at most adamw_chunk), and an index into `rates`. Chunks do not overlap. With scales they begin at
  /// multiples of moment_block in the state buffers.
  Tensor chunks = {};
  Tensor scalars = {};  ///< optional (StepScalar::count) f64
};
inline constexpr int64_t adamw_chunk = 16384;
/// Elements of scaled optimizer state that share a scale.
inline constexpr int64_t moment_block = 64;
constexpr int64_t moment_blocks(int64_t n) {
  return (n + moment_block - 1) / moment_block;
}
/// Whether state of this type has scales.
constexpr bool has_moment_scales(DType t) {
  return t == DType::f16 || t == DType::e4m3;
}
void adamw(Exec& exec, const AdamW& a);
Cost cost(const Exec& exec, const AdamW& a);

/// Elements of one update that are consecutive in the flat buffers and in the state buffers.
struct AdamWRange {
  int64_t flat = 0;   ///< first element in the flat buffers
  int64_t state = 0;  ///< first element in the state buffers
  int64_t count = 0;
  int rates = 0;  ///< index into AdamW::rates
};
/// The rows of AdamW::chunks: the ranges, in order, cut into pieces of at most adamw_chunk elements. Ranges
/// that begin at multiples of 4 elements are the fast case.
std::vector<int64_t> adamw_chunks(std::span<const AdamWRange> ranges);
/// The number of its rows.
int64_t adamw_chunk_count(std::span<const AdamWRange> ranges);

/// Optimizer state in host memory as f32: n elements, the first of which is element `skip` of its block, in
/// the formats of AdamW. `scales`: from the block of the first element on; null for types without.
void decode_moments(DType dtype, const void* values, const uint8_t* scales, int64_t skip, int64_t n,
                    float* out);
/// The inverse, rounded to nearest: state that was decoded gives the same numbers. The first element begins a
/// block.
void encode_moments(DType dtype, const float* x, int64_t n, void* values, uint8_t* scales);
/// Master weights in host memory from weights and AdamW::remainder, and the remainders of master weights.
void join_master(const bf16* weights, const uint16_t* remainder, int64_t n, float* out);
void split_master(const float* master, int64_t n, uint16_t* remainder);

/// out[0] = or += (accumulate) the sum of squares of x in double, added in an order that depends only on n:
/// blocks of norm_block elements, then the block sums in order (on a GPU in a tree over them). Non-finite
/// input gives a non-finite result.
struct SumOfSquares {
  Tensor x;    ///< (n) contiguous f32 or bf16
  Tensor out;  ///< (1) f64
  bool accumulate = false;
};
inline constexpr int64_t norm_block = 16384;
void add_sum_of_squares(Exec& exec, const SumOfSquares& a);
Cost cost(const Exec& exec, const SumOfSquares& a);
size_t workspace(const Exec& exec, const SumOfSquares& a);
/// Scratch bytes of add_sum_of_squares on a GPU for n elements.
size_t sum_of_squares_workspace(int64_t n);

/// out[0] += the sum of x in double, in an order that depends only on n. x is (n) f32, `out` (1) f64.
struct AddSum {
  Tensor x, out;
};
void add_sum(Exec& exec, const AddSum& a);
Cost cost(const Exec& exec, const AddSum& a);

/// out = x converted between f32, bf16 and f16.
struct Convert {
  Tensor x, out;  ///< (n) contiguous f32, bf16 or f16
};
void convert(Exec& exec, const Convert& a);
Cost cost(const Exec& exec, const Convert& a);

/// out = or += (accumulate) the sum of the parts of x, added in fp32 in the order of the parts: gradients of
/// several ranks (communicated in bf16) or of one more microbatch. A bf16 result is rounded once.
struct SumParts {
  Tensor x;    ///< (parts, n) contiguous f32 or bf16
  Tensor out;  ///< (n) f32 or bf16
  bool accumulate = false;
};
void sum_parts(Exec& exec, const SumParts& a);
Cost cost(const Exec& exec, const SumParts& a);

/// Sets contiguous memory to zero using all threads, or by the device itself.
struct Zero {
  Tensor x;
};
void zero(Exec& exec, const Zero& a);
Cost cost(const Exec& exec, const Zero& a);

}  // namespace nrl::ops
