#pragma once
// The last layer of a decoder.
//
// Shapes: n tokens of this rank's residual stream (sequence_rows), N of the microbatch, H hidden size, V this
// rank's vocabulary.

#include <optional>
#include <vector>

#include "apps/model/layers/sublayer.h"

namespace nrl::model {

/// Has LayerContext::rule write the weights of rows [begin, begin + count), whose results are computed.
void call_rule(const Run& r, int64_t begin, int64_t count);

/// Final norm, LM head and loss, computed in chunks of tokens: the logits of the whole microbatch are never
/// materialized. Training computes the gradient of the logits in the forward pass, from the loss weights of
/// the batch or of LayerContext::rule (Dependence).
class Head : public Layer {
 public:
  /// `below`: the ports of the previous layer.
  Head(const LayerContext& context, const ParameterList& parameters, const precision::Recipe& recipe,
       int64_t chunk_tokens, const Ports& below);
  void forward(Run& r) override;
  void backward(Run& r) override;
  ParameterUse parameters(bool backward) const override;

 private:
  /// The rows of a chunk.
  struct Rows {
    int64_t begin, count;
    Tensor x, logits, target;
    Tensor d_logits = {};  ///< overwrites the logits, in fewer bits their first half
  };
  template <class F>
  void for_each_chunk(Run& r, F&& work) const;
  void train(Run& r) const;
  void compute_logits(Run& r, const Rows& rows) const;
  /// Log-probabilities, and what else the rule reads, of logits that stay as they are.
  void compute_log_probs(Run& r, const Rows& rows) const;
  /// The ids and logits of LossNeeds::top_k.
  void select_largest(Run& r, const Rows& rows) const;
  /// The gradients of log-probabilities and logits at once, with the weights of the batch.
  void fused_gradient(Run& r, const Rows& rows) const;
  /// Distillation: the scores of the rows, and in training the gradient of their logits.
  void compute_divergence(Run& r, const Rows& rows) const;
  /// The gradient of the logits with the weights of the rule.
  void gradient_of_logits(Run& r, const Rows& rows) const;
  /// The gradients of x and of the matrix.
  void gradients(Run& r, const Rows& rows) const;
  Tensor separate_gradient(const Rows& rows) const;
  /// Gathers the statistics of a chunk of logits from all tensor-parallel ranks; empty on a single rank.
  Tensor gathered_statistics(Run& r, const Rows& rows) const;
  int statistics_width() const { return context().loss.entropy ? 4 : 3; }

  int weight_;
  std::vector<int> norm_parameters_;
  bool tied_;
  DType d_logits_dtype_;
  int64_t chunk_tokens_;
  Slice vocabulary_;  ///< the rows of the matrix on this rank, V of them
  std::optional<PreNorm> norm_;
  std::optional<ColumnInput> input_;
  Slot logits_;      ///< (chunk, V)
  Slot statistics_;  ///< (chunk, 3 or 4 x t) f32, read as (t, chunk, 3 or 4): of each rank's logits; unset if
                     ///< t = 1
  /// Distillation with k ids: (chunk, k) f32, logits at the ids and then their gradient; (chunk, 2) f32,
  /// ops::TopkKl::rest.
  Slot at_ids_, rest_;
  Slot largest_;  ///< (2 t, chunk, k): ids and then logits of each rank's largest; unset if t = 1
  Slot d_norm_;   ///< (n, H)
  Slot sampled_;  ///< (chunk, H): the rows that generation computes logits of
};

/// Final norm, and the score of every token: one dot product, in place of the log-probability. Training
/// computes the gradients in the forward pass, as Head does. Rows without a target have scores as well.
class ScoreHead : public Layer {
 public:
  /// `below`: the ports of the previous layer.
  ScoreHead(const LayerContext& context, const ParameterList& parameters, const precision::Recipe& recipe,
            const Ports& below);
  void forward(Run& r) override;
  void backward(Run& r) override;
  ParameterUse parameters(bool backward) const override;

 private:
  /// Computes the scores of all N tokens of the microbatch; with sequence parallelism every rank its own,
  /// which are gathered.
  void scores(Run& r) const;
  /// dLoss/dscore (N) f32, of the rule or of the batch.
  Tensor weights(const Run& r) const;
  /// Writes the weights of this rank's rows, times the loss scale, to d_score_.
  void scale_weights(Run& r) const;
  void gradients(Run& r) const;

  int weight_;
  std::vector<int> norm_parameters_;
  std::optional<PreNorm> norm_;
  Slot d_score_;  ///< (n, 1)
  Slot d_norm_;   ///< (n, H)
  // With a loss scale: (1) i32, (1) f32 and (n, 1) f32.
  Slot zero_, factor_, scaled_;
};

}  // namespace nrl::model
