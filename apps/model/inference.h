#pragma once
// Running a decoder forward with a key/value cache, one sequence, for sampling text.

#include <cstdint>
#include <span>
#include <vector>

#include "apps/model/block.h"
#include "core/device/cpu/memory.h"

namespace nrl::model {

class Inference {
 public:
  /// A session of at most `max_tokens` positions. `views` are indexed like ParameterList::all (gradients
  /// unused); all references outlive the session. Activations and cache have the weights' dtype. The session
  /// sets the exec's workspace.
  Inference(const ModelSpec& spec, const ParameterList& parameters, std::vector<ParameterView> views,
            ops::Exec& exec, int64_t max_tokens);

  /// Appends tokens (at least one; together at most max_tokens) and returns the logits (V) of the token after
  /// the last one, valid until the next call.
  std::span<const float> append(std::span<const int32_t> tokens);

  /// Forgets all tokens; the next append() begins a sequence.
  void reset() { length_ = 0; }
  int64_t length() const { return length_; }
  int64_t max_tokens() const { return max_tokens_; }

 private:
  void append_chunk(std::span<const int32_t> tokens);

  const ModelSpec& spec_;
  const ParameterList& parameters_;
  std::vector<ParameterView> views_;
  ops::Exec& exec_;
  int64_t max_tokens_, length_ = 0;
  DType dtype_;
  Tensor rope_table_;
  std::vector<Tensor> keys_, values_;  ///< per layer (max_tokens, kv_width)
  cpu::HostMemory memory_;
  Tensor ids_, positions_, cu_, resid_, out_, norm_, qkv_, attn_, mlp_, act_, logits_;
};

}  // namespace nrl::model
