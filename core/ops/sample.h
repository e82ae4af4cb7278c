#pragma once
// Sampling of the next token from softmax(logits / temperature) by the Gumbel-max trick: the token with the
// largest z_v + g_v, z = logits / temperature, where g_v = -log(-log(u_v)) is noise that depends on the seed,
// the sequence, the position and the token only. The choice depends neither on the batch nor, up to ties
// within rounding, on how the vocabulary is divided over ranks.
//
// Noise: u_v = (x + 1/2) 2^-32, x word v % 4 of Philox4x32-10 with the seed as key and the counter (sample,
// position 2^32 + v / 4).

#include "core/ops/exec.h"

namespace nrl::ops {

/// Numbers of a row of SampleTokens::out.
struct SamplePart {
  /// The largest z + g of the slice, its token (-1: none, where there is no number), the largest z, the sum
  /// of exp(z - largest), and z of the token.
  enum Column : uint8_t { score, token, largest, sum, value, columns };
};

/// Computes the best token of a slice of the vocabulary, and its part of the log-sum-exp, for each row. A
/// temperature of 0 chooses the largest logit, with z = logits. Equal scores: the smaller token.
struct SampleTokens {
  Tensor logits;       ///< (S, V) f32; rows may be strided
  Tensor temperature;  ///< (S) f32, at least 0
  Tensor seed;         ///< (S) i64
  Tensor sample;       ///< (S) i64: the sequence, among all of the seed
  Tensor position;     ///< (S) i32, at least 0: of the sampled token in its sequence
  int64_t tokens = 0;  ///< tokens from this one on are not sampled (padding), but count in the log-sum-exp
  int64_t first_column = 0;  ///< the token of column 0; less than 2^24 in all
  Tensor out;                ///< (S, SamplePart::columns) f32, contiguous
};
void sample_tokens(Exec& exec, const SampleTokens& a);
Cost cost(const Exec& exec, const SampleTokens& a);

/// Joins the parts of all slices: the sampled token (-1: there is none), and its log-probability z - lse.
struct JoinSamples {
  Tensor parts;     ///< (slices, S, SamplePart::columns) f32, contiguous
  Tensor token;     ///< (S) i32
  Tensor log_prob;  ///< (S) f32
};
void join_samples(Exec& exec, const JoinSamples& a);
Cost cost(const Exec& exec, const JoinSamples& a);

}  // namespace nrl::ops
