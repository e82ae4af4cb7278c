#pragma once
// Causal attention of a layer, forward and backward.

#include "tests/reference/decoder.h"

namespace reference {

struct Attention {
  // softmax(q k^T / sqrt(head_dim)) of the visible tokens, (tokens, tokens) for each query head
  std::vector<Tensor> p;
  Tensor out;  // (tokens, heads * head_dim)
};

/// `window`: tokens that a token sees, itself included; 0: all before it.
Attention attention(const Config& c, size_t window, const Layout& layout, const Tensor& q, const Tensor& k,
                    const Tensor& v);
/// Adds to dq, dk and dv.
void attention_backward(const Config& c, size_t window, const Layout& layout, const Tensor& dout,
                        const Attention& a, const Tensor& q, const Tensor& k, const Tensor& v, Tensor& dq,
                        Tensor& dk, Tensor& dv);

}  // namespace reference
