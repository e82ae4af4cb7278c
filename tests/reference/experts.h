#pragma once
// A mixture of experts in double precision: the router, its losses, the experts and the shared expert.

#include <functional>
#include <string>
#include <vector>

#include "tests/reference/tensor.h"

namespace reference {

/// The part of a config.json that describes experts.
struct Experts {
  size_t count = 0, chosen = 0;    ///< experts of a layer, and of a token; count 0: none
  size_t ffn = 0, shared_ffn = 0;  ///< inner sizes; shared_ffn 0: no shared expert
  bool normalize = false;          ///< the chosen experts' weights add to 1
  std::vector<bool> dense;         ///< by layer: an ordinary MLP
  double aux_loss = 0, z_loss = 0;
  bool operator==(const Experts&) const = default;
};

/// A gated MLP: down(silu(gate(x)) * up(x)).
struct GatedMlp {
  Tensor x, gate, up, hidden;
};

/// What the backward pass of a layer with experts needs.
struct ExpertLayer {
  Tensor logits, probability;               ///< (tokens, experts); softmax(logits)
  std::vector<std::vector<size_t>> chosen;  ///< by token
  Tensor weight;                            ///< (tokens, experts): of the chosen experts, else 0
  std::vector<std::vector<size_t>> tokens;  ///< by expert
  std::vector<GatedMlp> experts;
  std::vector<Tensor> out;  ///< of each expert, not weighted
  GatedMlp shared;
  Tensor shared_out, shared_gate;  ///< not weighted; sigmoid (tokens, 1)
};

/// x: the normalized tokens of one sequence. Weights are at `at` + "router.weight", "expert.E.gate.weight",
/// ...
Tensor experts_forward(const Experts& e, const Tensors& w, const std::string& at, const Tensor& x,
                       ExpertLayer& layer);
/// Returns dx. `router_scale`: of the layer's router losses in the gradient.
Tensor experts_backward(const Experts& e, const Tensors& w, const std::string& at, const Tensor& x,
                        const Tensor& dy, const ExpertLayer& layer, double router_scale, Tensors& gradients);
/// aux_loss * E / (k T^2) * sum over e of (tokens of e) (sum of e's probabilities)
/// + z_loss * mean of logsumexp(logits)^2.
double router_loss(const Experts& e, const ExpertLayer& layer);

}  // namespace reference
