#pragma once
// FP8 operands of GEMMs. Tensor cores of Hopper multiply row-major (rows, inner) operands only, so a matrix
// that several GEMMs read has two copies: itself and its transpose, each rounded from the original values.
//
// A stored number is the real one divided by its scale (core/base/scaling.h), rounded to nearest even. Scales
// of blocks (row128, block128, mx32) are found here: the smallest power of two, from 2^-126, for which the
// block's largest number fits; a block with NaN or infinity has the scale NaN. The scale of a tensor is
// given: larger numbers saturate, NaN and infinity become NaN. The padding of tiles of mx32 scales is 0.

#include "core/ops/activation.h"
#include "core/ops/exec.h"
#include "core/ops/norm.h"

namespace nrl::ops {

/// A norm of x by rows, with the statistics that norm_forward() has written.
struct QuantizeNorm {
  Tensor weight = {};  ///< (K), as in NormForward; empty: there is no norm
  float weight_offset = 0;
  Tensor bias = {};  ///< optional (K)
  Tensor mean = {};  ///< (N) f32, of layer norms only
  Tensor rstd = {};  ///< (N) f32
  explicit operator bool() const { return static_cast<bool>(weight); }
};

/// The matrix to round: x (N, K), or a function of x, computed in f32 as x is read, which needs no memory: an
/// activation, f(x) or gated f(gate) * up of an x (N, 2K) as for activation_forward(); with `dout` the
/// gradient of x, with the bits of ActivationBackward::dx; or a norm, with the bits of NormForward::out (the
/// last two are rounded to x's type first).
struct QuantizeSource {
  Tensor x;  ///< bf16, on a CPU also f32, with contiguous rows, whose step is a multiple of 16, aligned to 16
             ///< bytes, and contiguous with a norm; N and K are multiples of 16, N only for transposed copies
             ///< without groups
  Activation activation = Activation::none;
  bool gated = false;
  QuantizeNorm norm = {};  ///< without an activation, and in quantize() without groups only
  Tensor dout = {};  ///< (N, F) as for activation_backward(), rows laid out like x; with scales of blocks and
                     ///< gated, F is a multiple of 128: halves_scales()
  int64_t columns() const { return gated && !dout ? x.dim(1) / 2 : x.dim(1); }  ///< K
};
/// True if no ScaleTile of a matrix has columns of both of its halves, of `half` columns each.
constexpr bool halves_scales(Scaling scaling, int64_t half) {
  return !has_scale_blocks(scaling) || half % scale_tile(scaling).columns == 0;
}

/// row = x and column = x^T in FP8, x being the source; one may be absent. Both have one type (e4m3 or e5m2)
/// and one scaling. Scaling::tensor: they share `scales.data`, and `scales.amax`, if not null, becomes the
/// maximum of itself and |x| (infinity or NaN if x has one).
/// With `measured` their scale is computed first, as by update_scales() without `keep`, and written (=);
/// `measured` stays as it is.
///
/// With `offsets` the source has G groups of rows (the experts of grouped_linear.h), [offsets[g], offsets[g +
/// 1]). The copies have P >= grouped_rows(N, G, row_unit()) rows, or columns of the transpose, and groups
/// begin at group_begin() (core/base/scaling.h). The padding of a group is 0 up to the next multiple of the
/// unit, and unwritten beyond.
///
/// With `parts` the source stacks equal matrices, such as the weights of experts, and `column` stacks their
/// transposes. N / parts and K are multiples of row_unit() then.
struct Quantize {
  QuantizeSource source;
  Tensor row = {};       ///< (N, K), or (P, K), contiguous, with dense scales
  Tensor column = {};    ///< (K, N), or (K, P), or (parts K, N / parts), the same
  Tensor offsets = {};   ///< optional (G + 1) i32, ascending from 0
  int64_t parts = 1;     ///< without offsets and a norm
  Tensor measured = {};  ///< optional (1) f32, amax of the source; with Scaling::tensor, not `scales.amax`
  int margin = 0;        ///< of `measured`, as in UpdateScales
};
void quantize(Exec& exec, const Quantize& a);
/// One of the parts of a call.
inline Quantize part_of(Quantize a, int64_t part) {
  for (Tensor* t : {&a.source.x, &a.row, &a.column}) {
    const int64_t rows = *t ? t->dim(0) / a.parts : 0;
    if (*t) *t = t->rows(part * rows, rows);
  }
  a.parts = 1;
  return a;
}
Cost cost(const Exec& exec, const Quantize& a);

/// out = x^T of an FP8 matrix: the column copy of what x is the row copy of. Scales of block128 are
/// transposed as well; a tensor scale is shared.
struct Transpose {
  Tensor x;    ///< (N, K) contiguous e4m3 or e5m2; N and K are multiples of 16; dense scales
  Tensor out;  ///< (K, N) the same type and scaling
};
void transpose(Exec& exec, const Transpose& a);
Cost cost(const Exec& exec, const Transpose& a);

/// amax = max(amax, |x|) of the source, NaN or infinity if it has one. With `offsets` (as in Quantize) only
/// the rows of groups count.
struct LargestMagnitude {
  QuantizeSource source;
  Tensor amax;          ///< (1) f32, not negative
  Tensor offsets = {};  ///< optional (G + 1) i32
};
void largest_magnitude(Exec& exec, const LargestMagnitude& a);
Cost cost(const Exec& exec, const LargestMagnitude& a);

/// Elements [first, first + n) of a matrix (R, K) in row-major order; other ranks have the rest. Its blocks
/// of 128 x 128 are (ceil(R / 128), B), B being K / 128 rounded up to a multiple of 4: their scales as
/// scale_matrix(Scaling::block128) says.
struct MatrixPart {
  Tensor x;             ///< (n) contiguous f32 or bf16; n is a multiple of 16
  int64_t first = 0;    ///< a multiple of 16
  int64_t columns = 0;  ///< K, a multiple of 128
};

/// For every block: amax = max(amax, |x|) over its elements in the part, NaN or infinity if it has one.
struct BlockMagnitudes {
  MatrixPart part;
  Tensor amax;  ///< (blocks) contiguous f32, not negative
};
void block_magnitudes(Exec& exec, const BlockMagnitudes& a);
Cost cost(const Exec& exec, const BlockMagnitudes& a);

/// Writes the codes of the part as quantize() does, with the given block scales.
struct QuantizePart {
  MatrixPart part;
  Tensor scale;  ///< (blocks) contiguous f32, as update_scales() finds them
  Tensor out;    ///< (n) contiguous e4m3 or e5m2
};
void quantize_part(Exec& exec, const QuantizePart& a);
Cost cost(const Exec& exec, const QuantizePart& a);

/// Scales of n tensors from their largest magnitudes in the last L steps:
/// scale[i] = amax * 2^margin / (largest number of the format), where amax is the maximum of a column, or its
/// first row only. A magnitude of 0 (nothing was measured), NaN or infinity does not count; if none does,
/// `keep` keeps the scale and otherwise it becomes 1. Then the rows move down by one, and the first is 0.
///
/// `blocks`: computes the scales of n blocks as quantize() does, from magnitudes of this step (L = 1).
struct UpdateScales {
  Tensor amax;   ///< (L, n) f32; columns contiguous
  Tensor scale;  ///< (n) f32
  DType format = DType::e4m3;
  int margin = 0;  ///< -64 to 64
  bool most_recent = false;
  bool keep = false;
  bool blocks = false;  ///< margin, most_recent and keep have no meaning
};
void update_scales(Exec& exec, const UpdateScales& a);
Cost cost(const Exec& exec, const UpdateScales& a);

}  // namespace nrl::ops
