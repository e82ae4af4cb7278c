#pragma once
// The decoders of the product once more, in double precision and as plainly as a textbook writes them: one
// sequence at a time, every activation kept, the backward pass by hand. What the tests compare the product
// with must not share its code: files are read by core/io, everything else is here.

#include <cstdint>
#include <string>
#include <vector>

#include "tests/reference/experts.h"
#include "tests/reference/tensor.h"

namespace reference {

using Tokens = std::vector<int32_t>;

/// How rotary frequencies are rescaled for longer contexts.
struct Rope {
  std::string type = "default";  ///< default, linear, dynamic, llama3, yarn
  double theta = 10000;
  size_t rotary_dim = 0;
  double factor = 1, low_freq_factor = 1, high_freq_factor = 4;
  double beta_fast = 32, beta_slow = 1, attention_factor = 0;  ///< 0: 0.1 ln(factor) + 1
  bool truncate = true;
  double original_max_position = 0;
  bool operator==(const Rope&) const = default;
};

/// A config.json of Hugging Face.
struct Config {
  std::string family;  ///< gpt2, llama, mistral, qwen2, qwen3, mixtral, qwen2_moe, qwen3_moe,
                       ///< gemma3_text
  size_t vocab_size = 0, hidden = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0, ffn = 0;
  size_t positions = 0;  ///< rows of the table of learned positions; RoPE's longest context
  std::string activation;
  double norm_eps = 0;
  bool tied = false, qkv_bias = false, o_bias = false, mlp_bias = false, qk_norm = false;
  size_t window = 0;        ///< a token sees this many tokens, itself included; 0: all before it
  size_t period = 0;        ///< only every period-th layer has no window; 0: all layers are equal
  double query_scalar = 0;  ///< attention scores are divided by its root
  double initializer_range = 0.02;
  Rope rope, local_rope;  ///< local_rope: of layers with a window, if some have none
  Experts experts;
  bool has_experts(size_t layer) const { return experts.count > 0 && !experts.dense[layer]; }
  bool gpt2() const { return family == "gpt2"; }
  /// Norms multiply by 1 + weight and follow attention and MLP as well, embeddings are multiplied by the root
  /// of their width.
  bool gemma() const { return family == "gemma3_text"; }
  bool windowed(size_t layer) const { return window > 0 && (period == 0 || (layer + 1) % period != 0); }
  const Rope& rope_of(size_t layer) const {
    return period > 0 && (layer + 1) % period != 0 ? local_rope : rope;
  }
  bool operator==(const Config&) const = default;
};

/// The configuration in the text of a config.json.
Config parse_config(const std::string& json);
/// Reads `directory`/config.json.
Config read_config(const std::string& directory);

/// Every tensor that a model of this configuration has, as zeros: "embedding.weight" (tokens),
/// "positions.weight" (GPT-2), "head.weight" (unless tied), "final_norm.weight"; of layer N "layers.N." +
/// attention_norm, q, k, v, q_norm, k_norm, o, mlp_norm, gate, up, down + ".weight" and, where the family has
/// one, ".bias"; attention_post_norm and mlp_post_norm of Gemma. Matrices are (out, in). With experts,
/// instead of gate, up and down: router, expert.E.gate (up, down), and of a shared expert shared.gate (up,
/// down), shared_gate.
Tensors shapes(const Config& config);

/// Reads the weights of a model directory (model.safetensors or its shards) in f32, bf16 or f16, from the
/// names of Hugging Face. GPT-2's matrices lie transposed in the file and hold q, k and v in one.
Tensors read_weights(const Config& config, const std::string& directory);

/// Reads "exp_avg", "exp_avg_sq" or "master" from the optimizer files of a training checkpoint, where
/// matrices are (out, in) and any tensor may be stored in flat pieces NAME@OFFSET.
Tensors read_optimizer_state(const Config& config, const std::string& directory, const std::string& kind);

/// Where the tokens of a sequence stand that holds several documents. Empty lists: one document.
struct Layout {
  std::vector<size_t> positions;  ///< of each token
  std::vector<size_t> first;      ///< of each token: the first token that its document lets it see
};

/// Logits (tokens, vocab_size): row t predicts token t + 1. `rope_length` matters for rope type dynamic only:
/// the length that the frequencies are stretched for (0: that of `tokens`).
Tensor logits(const Config& config, const Tensors& weights, const Tokens& tokens, size_t rope_length = 0);

/// Sum over t of -log p(targets[t] | tokens[0..t]); a negative target counts nothing.
double loss(const Config& config, const Tensors& weights, const Tokens& tokens, const Tokens& targets,
            const Layout& layout = {});

/// The same, and adds `scale` times its gradient to `gradients`, and router_scale times that of
/// router_losses().
double loss_and_gradient(const Config& config, const Tensors& weights, const Tokens& tokens,
                         const Tokens& targets, double scale, Tensors& gradients, const Layout& layout = {},
                         double router_scale = 0);

/// The sum over layers of router_loss(), of one sequence.
double router_losses(const Config& config, const Tensors& weights, const Tokens& tokens,
                     const Layout& layout = {});

/// `prompt` followed by the `count` likeliest tokens, each chosen from the whole sequence before it; of equal
/// logits the lower id.
Tokens greedy(const Config& config, const Tensors& weights, Tokens prompt, size_t count);

/// The rotary embedding's table (length, rotary_dim): in each row the cosines of a position, then its sines.
Tensor rope_table(const Rope& rope, size_t length, size_t rope_length);

}  // namespace reference
