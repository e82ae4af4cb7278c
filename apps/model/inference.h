#pragma once
// Running a decoder forward with a key/value cache, one sequence, for sampling text: the layers of training
// in the mode `generation`.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "apps/model/stage.h"

namespace nrl::model {

class Inference {
 public:
  /// A session of at most `max_tokens` positions. `views` are indexed like ParameterList::all (gradients
  /// unused) and lie in the memory of `exec`; all references outlive the session. Activations and cache have
  /// the weights' dtype. The session has a workspace of its own.
  Inference(const ModelSpec& spec, const ParameterList& parameters, std::vector<ParameterView> views,
            const ops::Exec& exec, int64_t max_tokens);
  ~Inference();
  Inference(Inference&&) = delete;

  /// Appends tokens (at least one; together at most max_tokens) and returns the logits (V) of the token after
  /// the last one, in host memory, valid until the next call.
  std::span<const float> append(std::span<const int32_t> tokens);

  /// Forgets all tokens; the next append() begins a sequence.
  void reset() { cache_.length = 0; }
  int64_t length() const { return cache_.length; }
  int64_t max_tokens() const { return max_tokens_; }

 private:
  void append_chunk(std::span<const int32_t> tokens);

  int64_t max_tokens_;
  ops::Exec exec_;
  LayerContext context_;
  std::unique_ptr<Stage> stage_;
  memory::Arenas arenas_;
  KeyValueCache cache_;
  MicroBatch batch_;
  std::vector<float> logits_;
};

}  // namespace nrl::model
