#pragma once
// Vectors of f32 as fp8 numbers with a power-of-two scale for every 128 neighbors: gradients on their way
// between ranks.

#include "core/ops/exec.h"

namespace nrl::ops {

/// Neighbors that share a scale.
inline constexpr int64_t fp8_block = 128;
/// Bytes of `width` encoded elements: the numbers, then a scale byte per block, padded to 64 bytes.
constexpr int64_t fp8_row_bytes(int64_t width) {
  return (width + (width + fp8_block - 1) / fp8_block + 63) / 64 * 64;
}

/// out = x + error, row by row: numbers rounded to nearest even, and scales of E8M0 (2^(byte - 127); 0: all
/// of the block is zero; 255: see below), the smallest powers of two for which the block's largest number
/// fits. Then error = x + error - what `out` stands for, exact.
///
/// A block with NaN or infinity has the scale 255, decodes to NaN and leaves its errors as they are.
struct Fp8Encode {
  Tensor x;                    ///< (rows, W) contiguous f32
  Tensor error = {};           ///< optional (rows, W) contiguous f32: added to x, then what rounding lost
  Tensor out;                  ///< (rows, fp8_row_bytes(W)) contiguous u8; its padding is not written
  DType format = DType::e4m3;  ///< or e5m2
};
void fp8_encode(Exec& exec, const Fp8Encode& a);
Cost cost(const Exec& exec, const Fp8Encode& a);

/// out[g] = the sum of the encoded rows x[g * parts + p] over p, added in fp32 in the order of p, where
/// parts = (rows of x) / (rows of out).
struct Fp8Decode {
  Tensor x;    ///< (groups * parts, fp8_row_bytes(W)) contiguous u8
  Tensor out;  ///< (groups, W) contiguous f32, overwritten
  DType format = DType::e4m3;
};
void fp8_decode(Exec& exec, const Fp8Decode& a);
Cost cost(const Exec& exec, const Fp8Decode& a);

}  // namespace nrl::ops
