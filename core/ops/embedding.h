#pragma once
// Token and learned position embeddings.

#include <optional>

#include "core/ops/exec.h"

namespace nrl::ops {

/// out[n] = scale * table[ids[n]] (+ position_table[positions[n]]).
struct EmbeddingForward {
  Tensor ids;                  ///< (N) i32, without first_id each must be in [0, V); not checked
  Tensor table;                ///< (V, H) f32 or bf16; f16 if `out` is
  Tensor position_table = {};  ///< optional (P, H)
  Tensor positions = {};       ///< (N) i32, with position_table
  Tensor out;                  ///< (N, H) f32, bf16 or f16
  /// The table is a slice of a larger one: it has the rows of ids [first_id, first_id + V), and other ids
  /// select a row of zeros.
  std::optional<int64_t> first_id = {};
  float scale = 1;
};

/// dtable[ids[n]] += scale * dout[n]; dposition_table likewise, without scale. The order of additions, and
/// with it the bits, depends on the ids alone: CPU threads split the columns, a GPU sorts the tokens by id
/// (stably).
struct EmbeddingBackward {
  Tensor ids;
  Tensor dout;                  ///< (N, H)
  Tensor dtable;                ///< (V, H) f32, accumulated
  Tensor positions = {};        ///< with dposition_table
  Tensor dposition_table = {};  ///< optional (P, H) f32, accumulated
  /// As in the forward pass: other ids contribute nothing to dtable.
  std::optional<int64_t> first_id = {};
  float scale = 1;
};

void embedding_forward(Exec& exec, const EmbeddingForward& a);
void embedding_backward(Exec& exec, const EmbeddingBackward& a);
/// As if all tokens were different, as far as the table has rows for that.
Cost cost(const Exec& exec, const EmbeddingForward& a);
Cost cost(const Exec& exec, const EmbeddingBackward& a);
size_t workspace(const Exec& exec, const EmbeddingBackward& a);

/// Scratch bytes of embedding_backward on a GPU.
size_t embedding_backward_workspace(int64_t tokens, int64_t hidden);

}  // namespace nrl::ops
