#pragma once
// The layers of a decoder: embedding, blocks and head, and the layers at the boundaries between chunks.
//
// Shapes: n tokens of this rank's residual stream (sequence_rows), H hidden size, V this rank's vocabulary.

#include <optional>

#include "apps/model/layers/sublayer.h"

namespace nrl::model {

/// Token (and learned position) embeddings.
class Embedding : public Layer {
 public:
  Embedding(const LayerContext& context, const ParameterList& parameters, const precision::Recipe& recipe);
  void forward(Run& r) override;
  void backward(Run& r) override;
  ParameterUse parameters(bool backward) const override;

 private:
  /// ops::EmbeddingForward::first_id
  std::optional<int64_t> first_id() const;

  int token_table_, position_table_;
  Slice vocabulary_;  ///< the rows of the token table on this rank
  Slot d_dropped_;    ///< (n, H): gradient of the dropout's input; unset without dropout
  std::optional<RowOutput> output_;
};

/// One pre-norm block: attention, then the MLP or the experts.
class Block : public Layer {
 public:
  /// `below`: the ports of the previous layer.
  Block(const LayerContext& context, int layer, const LayerParameters& parameters,
        const precision::Recipe& recipe, bool fuse_gelu, const Ports& below);
  void forward(Run& r) override;
  void backward(Run& r) override;
  ParameterUse parameters(bool backward) const override;
  int64_t host_values() const override { return mlp_->host_values(); }

 private:
  LayerParameters parameters_;
  std::unique_ptr<Sublayer> attention_, mlp_;  ///< `mlp_` is a mixture of experts in blocks that have one
};

/// Final norm, LM head and loss, computed in chunks of tokens: the logits of the whole microbatch are never
/// materialized. Training computes the gradient of the logits in the forward pass, from the loss weights.
class Head : public Layer {
 public:
  /// `below`: the ports of the previous layer.
  Head(const LayerContext& context, const ParameterList& parameters, const precision::Recipe& recipe,
       int64_t chunk_tokens, const Ports& below);
  void forward(Run& r) override;
  void backward(Run& r) override;
  ParameterUse parameters(bool backward) const override;

 private:
  void chunks(Run& r, bool train) const;
  /// Gathers the statistics of a chunk of logits from all tensor-parallel ranks; empty on a single rank.
  Tensor gathered_statistics(Run& r, const Tensor& logits, const Tensor& target) const;

  int weight_;
  std::vector<int> norm_parameters_;
  bool tied_;
  DType d_logits_dtype_;
  int64_t chunk_tokens_;
  Slice vocabulary_;  ///< the rows of the matrix on this rank, V of them
  std::optional<PreNorm> norm_;
  std::optional<ColumnInput> input_;
  Slot logits_;      ///< (chunk, V)
  Slot statistics_;  ///< (chunk, 3 t) f32, read as (t, chunk, 3): of each rank's logits; unset if t = 1
  Slot d_norm_;      ///< (n, H)
};

/// First layer of a chunk other than the model's first: its output is received from the previous chunk.
class ChunkBegin : public Layer {
 public:
  ChunkBegin(const LayerContext& context, const precision::Recipe& recipe);
  void forward(Run&) override {}
  void backward(Run&) override {}
};

/// Last layer of a chunk other than the model's last: adds x to the residual stream, so that one tensor is
/// sent. The gradient d_x is received from the next chunk.
class ChunkEnd : public Layer {
 public:
  /// `layer`: index of the preceding block, which selects the dropout mask.
  ChunkEnd(const LayerContext& context, int layer, const precision::Recipe& recipe);
  void forward(Run& r) override;
  void backward(Run&) override {}

 private:
  int layer_;
};

}  // namespace nrl::model
