#pragma once
// The rows of bench ops.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "apps/bench/machine.h"

namespace nrl::bench {

struct OpCase {
  std::string name;
  bool gated = false;    ///< must reach the minimum of bench ops
  bool present = false;  ///< the device has its kernel
  std::function<std::function<void()>(Tensors&)> make;
};

/// Sizes of a model and a batch.
struct OpSizes {
  int64_t tokens, hidden, ffn, heads, kv_heads, head_dim, vocab, logit_rows, parameters;
};

/// The ops of generation, with activations of this dtype: a token of each of up to 64 sequences, with a
/// context of up to 1024 tokens in pages of 16. `machine` must outlive the cases.
std::vector<OpCase> generation_op_cases(Machine& machine, const OpSizes& sizes, DType activations);

}  // namespace nrl::bench
