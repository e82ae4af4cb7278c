#pragma once
// Rotary position embedding (Su et al. 2021) in the rotate-half layout of Hugging Face: pairs (i, i +
// rotary_dim / 2).

#include <vector>

#include "core/ops/exec.h"

namespace nrl::ops {

enum class RopeKind : uint8_t { standard, linear, dynamic, llama3, yarn };

/// How inverse frequencies are derived (Hugging Face's `rope_scaling`; YaRN: Peng et al. 2023).
struct RopeSpec {
  RopeKind kind = RopeKind::standard;
  int64_t rotary_dim = 0;  ///< even, <= head_dim
  double theta = 10000.0;
  double factor = 1.0;
  double low_freq_factor = 1.0, high_freq_factor = 4.0;  ///< llama3
  double beta_fast = 32.0, beta_slow = 1.0;              ///< yarn
  double attention_factor = 0.0;                         ///< yarn: 0 derives 0.1 * ln(factor) + 1
  bool truncate = true;                                  ///< yarn: round the correction range
  int64_t original_max_position = 0;                     ///< llama3, yarn, dynamic
};

/// cos and sin for positions [0, positions), interleaved as (positions, 2, rotary_dim / 2): first the
/// cosines, then the sines of a position. `sequence_length` matters for `dynamic` only (the length the
/// frequencies are stretched for). YaRN's attention factor is multiplied in.
std::vector<float> rope_table(const RopeSpec& spec, int64_t positions, int64_t sequence_length);

/// Rotates x in place: y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin. `inverse` applies the transpose, which is
/// the backward pass (the table's scale factor included). Head dimensions beyond rotary_dim are not changed.
struct Rope {
  Tensor x;          ///< (N, heads, D), rows may be strided, in place; f32, bf16 or f16
  Tensor table;      ///< (positions, rotary_dim) f32, from rope_table
  Tensor positions;  ///< (N) i32, each < table rows
  bool inverse = false;
  Tensor amax = {};  ///< (1) f32, optional: max(amax, |x|) of what it writes, as in NormForward
};
void rope(Exec& exec, const Rope& a);
Cost cost(const Exec& exec, const Rope& a);
/// Bytes of the rows of a rope table that tokens at `positions` read, at most: each counts once.
double rope_table_bytes(const Tensor& table, const Tensor& positions);

}  // namespace nrl::ops
