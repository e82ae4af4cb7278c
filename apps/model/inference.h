#pragma once
// The logits of one growing sequence: a GenerationPass whose pages follow each other.

#include <cstdint>
#include <span>
#include <vector>

#include "apps/model/generation_pass.h"

namespace nrl::model {

class Inference {
 public:
  /// A session of at most `max_tokens` positions. Other arguments as for GenerationPass.
  Inference(const ModelSpec& spec, const ParameterList& parameters, std::vector<ParameterView> views,
            const ops::Exec& exec, int64_t max_tokens);

  /// Appends tokens (at least one; max_tokens in total) and returns the logits (V) of the next token in host
  /// memory, valid until the next call.
  std::span<const float> append(std::span<const int32_t> tokens);

  /// The next append() starts a new sequence.
  void reset() { length_ = 0; }
  int64_t length() const { return length_; }
  int64_t max_tokens() const { return pass_.limits().longest; }

 private:
  GenerationPass pass_;
  std::vector<int32_t> pages_;
  int64_t length_ = 0;
};

}  // namespace nrl::model
