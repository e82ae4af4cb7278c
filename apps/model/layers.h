#pragma once
// The layers of a decoder: embedding, blocks, head, and what stands at the ends of a chunk that has
// neighbors.

#include <optional>

#include "apps/model/sublayers.h"

namespace nrl::model {

/// Token (and learned position) embeddings.
class Embedding : public Layer {
 public:
  Embedding(const LayerContext& context, const ParameterList& parameters, const precision::Recipe& recipe);
  void forward(Run& r) override;
  void backward(Run& r) override;

 private:
  int table_of_tokens_, table_of_positions_;
  Slot d_dropped_;  ///< the gradient behind dropout, where there is dropout
};

/// One pre-norm block (GPT-2, Llama, Mistral, Qwen2, Qwen3): attention, then the MLP.
class Block : public Layer {
 public:
  Block(const LayerContext& context, int layer, const LayerParameters& parameters,
        const precision::Recipe& recipe, bool fuse_gelu);
  void forward(Run& r) override;
  void backward(Run& r) override;

 private:
  AddSlot add_;
  Slot d_middle_;  ///< the gradient of the stream between attention and MLP
  std::optional<Attention> attention_;
  std::optional<Mlp> mlp_;
};

/// Final norm and LM head with its loss, in chunks of tokens: logits of the whole batch never exist.
/// Training computes the gradient of the logits in the forward pass, from the tokens' weights.
class Head : public Layer {
 public:
  Head(const LayerContext& context, const ParameterList& parameters, const precision::Recipe& recipe,
       int64_t chunk_tokens);
  void forward(Run& r) override;
  void backward(Run& r) override;

 private:
  void chunks(Run& r, bool train) const;

  int weight_;
  bool tied_;
  DType logits_gradient_;
  int64_t chunk_tokens_;
  std::optional<PreNorm> norm_;
  Slot logits_;  ///< (chunk, V) f32
  Slot d_norm_;
};

/// Begins a chunk that is not the model's first: its output is received from the chunk before.
class ChunkBegin : public Layer {
 public:
  ChunkBegin(const LayerContext& context, const precision::Recipe& recipe);
  void forward(Run&) override {}
  void backward(Run&) override {}
};

/// Ends a chunk that is not the model's last: adds up the residual stream, so that one tensor is sent. The
/// gradient d_x is received from the chunk behind.
class ChunkEnd : public Layer {
 public:
  /// `layer`: the block before.
  ChunkEnd(const LayerContext& context, int layer, const precision::Recipe& recipe);
  void forward(Run& r) override;
  void backward(Run&) override {}

 private:
  int layer_;
};

}  // namespace nrl::model
