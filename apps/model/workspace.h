#pragma once
// Scratch memory of the ops that a model runs, from the sizes alone.

#include "apps/model/spec.h"
#include "core/tensor/tensor.h"
#include "precision/recipe.h"

namespace nrl::model {

struct TrainingSizes {
  int64_t tokens;        ///< of a microbatch
  int64_t max_sequence;  ///< longest sequence
  int64_t head_chunk;    ///< tokens that have logits at a time
  precision::Recipe recipe;
  DeviceType device;
  int threads;                     ///< as Exec::partials() will be
  size_t optimizer_workspace = 0;  ///< what the step's end needs on a GPU
};
/// Bytes of forward, backward and update.
size_t training_workspace(const ModelSpec& spec, const TrainingSizes& sizes);

/// Bytes of generation: `tokens` at a time, against a cache of at most `max_tokens`.
size_t generation_workspace(const ModelSpec& spec, const precision::Recipe& recipe, int64_t tokens,
                            int64_t max_tokens, DeviceType device, int threads);

}  // namespace nrl::model
