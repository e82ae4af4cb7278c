#pragma once
// Describes a decoder: sizes, and the switches that distinguish the model families. Initialization, forward
// and backward pass, weight names and FLOP formulas all derive from it.

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "apps/model/spec/adapters.h"
#include "apps/model/spec/family.h"
#include "core/base/error.h"
#include "core/ops/activation.h"
#include "core/ops/norm.h"
#include "core/ops/rope.h"
#include "core/ops/router.h"

namespace nrl::model {

/// How tokens get to the experts of other ranks.
enum class TokenDispatcher : uint8_t { alltoall, allgather };
/// The tokens whose shares the load-balancing loss of a router compares: of a microbatch, of each of its
/// sequences, or of the microbatches of all data-parallel ranks since the step began.
enum class AuxLoss : uint8_t { microbatch, sequence, global };

/// The part of a model that reads its last hidden states h: the logits of all tokens, or the score v . h of a
/// reward model.
enum class HeadKind : uint8_t { vocabulary, scalar };

/// A mixture of experts in place of the MLP of some layers.
struct MoeSpec {
  int64_t experts = 0;  ///< 0: the model has none
  int64_t ffn = 0;      ///< inner size of an expert
  ops::RouterRule rule;
  bool expert_bias = false;    ///< a bias per expert chooses with the scores, and follows the load
  int64_t shared_ffn = 0;      ///< inner size of the MLP that every token passes, 0: none
  bool shared_gate = false;    ///< its output is weighted by the sigmoid of a projection (Qwen2-MoE)
  std::vector<uint8_t> dense;  ///< by layer: 1 if it has an ordinary MLP

  // Training only.
  float aux_loss = 0, z_loss = 0;  ///< coefficients
  AuxLoss aux_tokens = AuxLoss::microbatch;
  float bias_rate = 0;         ///< step size of the update of a bias
  double capacity_factor = 0;  ///< 0: no token is dropped
  /// alltoall: rows that there is memory for, relative to a balanced router; 0: memory for all rows that can
  /// arrive. More rows are exchanged in rounds.
  double row_slack = 0;
  bool pad_to_capacity = false;     ///< all experts get as many rows
  bool drop_by_probability = true;  ///< else the tokens that come last are dropped
  TokenDispatcher dispatcher = TokenDispatcher::alltoall;

  /// Tokens that an expert takes of `tokens`; 0: all. Generation drops none.
  int64_t capacity(int64_t tokens, bool generation) const;
  /// Rows that all experts get of `tokens`, at most.
  int64_t rows(int64_t tokens, bool generation) const;
  /// True if a loss depends on the tokens of each expert.
  bool has_aux_loss() const { return aux_loss > 0; }
  /// Whether training counts the tokens of each expert over a step.
  bool counts_steps() const { return expert_bias || aux_tokens == AuxLoss::global; }
  /// The value of moe_router_load_balancing_type.
  std::string_view aux_name() const;
};

/// Differences between the attention of layers.
struct LayerKind {
  int64_t window = 0;  ///< sliding window, 0: none
  size_t rope = 0;     ///< index into ModelSpec::ropes
  bool operator==(const LayerKind&) const = default;
};

struct ModelSpec {
  Family family = Family::llama;
  int64_t vocab_size = 0, hidden = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0, ffn = 0;
  int64_t max_positions = 0;

  ops::NormKind norm = ops::NormKind::rms;
  float norm_eps = 1e-5f;
  bool norm_bias = false;
  float norm_offset = 0;    ///< ops::NormForward::weight_offset of all norms, and of QK norms
  bool qk_norm = false;     ///< RMSNorm over head_dim of q and k, before RoPE (Qwen3)
  bool post_norms = false;  ///< a norm of each sublayer's output, before it is added to the residual stream

  bool qkv_bias = false, o_bias = false, mlp_bias = false;
  ops::Activation activation = ops::Activation::silu;
  bool gated = true;
  MoeSpec moe;

  bool learned_positions = false;
  bool use_rope = true;
  std::vector<ops::RopeSpec> ropes = std::vector<ops::RopeSpec>(1);  ///< unused without use_rope
  std::vector<LayerKind> layer_kinds;                                ///< by layer
  double query_scalar = 0;        ///< attention scores are divided by its root; 0: by the root of head_dim
  bool scaled_embedding = false;  ///< embeddings are multiplied by the root of `hidden`

  HeadKind head = HeadKind::vocabulary;
  bool new_head = false;  ///< not in the files of the source: training begins with random numbers
  bool tied = false;      ///< the logits have the matrix of the embedding
  float initializer_range = 0.02f;
  float residual_dropout = 0, embedding_dropout = 0, attention_dropout = 0;
  TrainedPart trained;

  std::vector<std::string>
      unread_keys;          ///< keys of config.json that are set but have no effect in this family
  std::string config_json;  ///< the source config.json; saved with the weights, unknown keys included

  int64_t q_width() const { return heads * head_dim; }
  int64_t kv_width() const { return kv_heads * head_dim; }
  int64_t qkv_width() const { return q_width() + 2 * kv_width(); }
  float attention_scale() const {
    return 1.0f /
           std::sqrt(static_cast<float>(query_scalar > 0 ? query_scalar : static_cast<double>(head_dim)));
  }
  int64_t window(int64_t layer) const { return layer_kinds[layer].window; }
  const ops::RopeSpec& rope(int64_t layer) const { return ropes[layer_kinds[layer].rope]; }
  /// Columns [first, first + heads * head_dim) of a (N, width) tensor as (N, heads, head_dim).
  Tensor heads_of(const Tensor& rows, int64_t first, int64_t count) const {
    return rows.columns(first, count * head_dim).split_heads(count, head_dim);
  }
  /// Output width of the first MLP matrix: [gate, up] when gated.
  int64_t mlp_in_width() const { return gated ? 2 * ffn : ffn; }
  /// Whether the layer has experts in place of an MLP.
  bool has_experts(int64_t layer) const { return moe.experts > 0 && moe.dense[layer] == 0; }
  int64_t expert_layers() const;
};

/// Replaces the logits by a new head with one number, unless the model has one.
void use_scalar_head(ModelSpec& spec);

/// Parameter count without biases and norms, in floating point: used to reject sizes that
/// would overflow int64.
double approximate_parameters(const ModelSpec& spec);

/// The difference from logits with a matrix of their own, for people: " (tied)", " (with a scalar head)".
std::string_view head_text(const ModelSpec& spec);

/// The experts in words, for people; empty without experts.
std::string experts_text(const ModelSpec& spec);

/// A size of the model with its key in config.json and another spelling of it (empty: none).
struct ModelSize {
  std::string_view key, alias;
  int64_t value = 0;
  double ratio = 0;  ///< to the largest value in published models
};
/// The sizes by how much they exceed published models: the first is the likely cause when a model is too
/// large.
std::vector<ModelSize> unusual_sizes(const ModelSpec& spec);

/// Exact model FLOPs of training on one token that attends to `keys` keys, itself included: 3 x forward, head
/// and adapters included, recomputation and the gradients of frozen weights excluded. `keys` may be a mean
/// over tokens and layers (attention_pairs()).
double training_flops_of_token(const ModelSpec& spec, double keys);
/// (query, key) pairs of attention in a sequence of length `t`, the mean of the layers, which may have
/// sliding windows.
double attention_pairs(const ModelSpec& spec, int64_t t);
/// The mean over the tokens of a sequence of length `t`.
double training_flops_per_token(const ModelSpec& spec, int64_t t);

}  // namespace nrl::model
