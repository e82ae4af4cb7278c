#pragma once
// Forward pass of one sequence with a key/value cache, for sampling text. Runs the layers of training
// in mode `generation`.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "apps/model/program/stage.h"

namespace nrl::model {

class Inference {
 public:
  /// A session of at most `max_tokens` positions. `views` are indexed like ParameterList::all (gradients
  /// unused), in the memory of exec's device. All references must outlive the session. Activations and cache
  /// have the weights' dtype. The session allocates its own workspace.
  Inference(const ModelSpec& spec, const ParameterList& parameters, std::vector<ParameterView> views,
            const ops::Exec& exec, int64_t max_tokens);
  ~Inference();
  Inference(Inference&&) = delete;

  /// Appends tokens (at least one; max_tokens in total) and returns the logits (V) of the next token in host
  /// memory, valid until the next call.
  std::span<const float> append(std::span<const int32_t> tokens);

  /// Clears the cache; the next append() starts a new sequence.
  void reset() { cache_.length = 0; }
  int64_t length() const { return cache_.length; }
  int64_t max_tokens() const { return max_tokens_; }

 private:
  /// The workspace that the ops need at most, from a dry run of a pass with `tokens` tokens at the end of a
  /// full cache. `bind`: binds the layers and the batch to no memory.
  size_t needed_workspace(int64_t tokens, const std::function<void()>& bind);
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
