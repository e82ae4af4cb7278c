#pragma once
// The layers of a decoder: embedding and blocks, and the layers at the boundaries between chunks.
//
// Shapes: n tokens of this rank's residual stream (sequence_rows), H hidden size.

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
  /// The factor of embeddings (ModelSpec::scaled_embedding), rounded to the type of the weights as
  /// transformers does.
  float scale(const Run& r) const;

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
