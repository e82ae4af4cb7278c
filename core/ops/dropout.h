#pragma once
// Dropout whose mask is a function of (seed, stream, global element), so that recomputation and any layout of
// ranks give the same mask, and the backward pass stores none.

#include "core/base/host_device.h"
#include "core/ops/exec.h"

namespace nrl::ops {

/// The stream of a step; `step` may be null.
NRL_HOST_DEVICE inline uint64_t dropout_stream(uint64_t stream, const int64_t* step) {
  return step ? (static_cast<uint64_t>(*step) << 24) | stream : stream;
}

/// out[n, h] = keep ? x[n, h] / (1 - p) : 0, keep = uniform(PhiloxStream(seed, stream), (first_row + n) * H +
/// h) >= p (with `width` in place of H and first_column + h in place of h); then out += residual[n, h],
/// rounded once. With `step` the stream is (step[0] << 24) | stream, read on the device, so that a captured
/// graph makes new masks. The backward pass is the same op on the gradient. out may alias x or residual.
struct Dropout {
  Tensor x;              ///< (N, H) f32, bf16 or f16
  Tensor residual = {};  ///< optional (N, H), added after dropping
  Tensor out;            ///< (N, H)
  float p = 0;
  uint64_t seed = 0;
  uint64_t stream = 0;    ///< of the call site: (layer + 1) << 4 | site
  int64_t first_row = 0;  ///< global index of row 0
  Tensor step = {};       ///< optional (1) i64
  /// optional (N) i32: row n counts as row rows[n] in the mask instead of n; context-parallel ranks do not
  /// hold consecutive rows.
  Tensor rows = {};
  /// The mask's rows have this many elements, of which x has those from first_column on; 0: x has whole rows.
  int64_t width = 0, first_column = 0;
};
void dropout(Exec& exec, const Dropout& a);
Cost cost(const Exec& exec, const Dropout& a);

/// Dropout fused into another op, which defines the rows; members as in Dropout. p = 0: none.
struct FusedDropout {
  float p = 0;
  uint64_t seed = 0, stream = 0;
  int64_t first_row = 0;
  Tensor step = {};
  Tensor rows = {};
};
/// Fails when a member is out of range for an op of `rows` rows.
void check_dropout(const char* op, const FusedDropout& a, int64_t rows);

}  // namespace nrl::ops
