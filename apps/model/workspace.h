#pragma once
// Scratch memory of the ops that a model runs, from the sizes alone.

#include "apps/model/decoder.h"

namespace nrl::model {

/// Bytes of forward, backward and update; `head_chunk` tokens have logits at a time.
size_t training_workspace(const ModelSpec& spec, const DecoderOptions& options, int64_t head_chunk);

/// Bytes of generation: `tokens` at a time, against a cache of at most `max_tokens`.
size_t generation_workspace(const ModelSpec& spec, DType dtype, int64_t tokens, int64_t max_tokens,
                            DeviceType device, int threads);

}  // namespace nrl::model
