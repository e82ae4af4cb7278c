#pragma once
// Workspace sizes of the ops of a model, computed from the shapes.

#include <vector>

#include "apps/model/spec/spec.h"
#include "core/ops/linear.h"
#include "core/tensor/tensor.h"
#include "precision/recipe.h"

namespace nrl::model {

struct TrainingSizes {
  int64_t tokens;        ///< of a microbatch
  int64_t routed;        ///< rows that this rank's experts get
  int64_t max_sequence;  ///< longest sequence
  int64_t head_chunk;    ///< tokens per chunk of the head
  precision::Recipe recipe;
  DeviceType device;
  int partials;                    ///< of the future Exec: Exec::partials()
  ops::Bf16Products products;      ///< CPU: KernelTable::bf16_products of the future Exec
  size_t optimizer_workspace = 0;  ///< GPU workspace of the update
  std::vector<int64_t> gemm_rows;  ///< numbers of tokens that the GEMMs of a block take at a time
};
/// Bytes for forward, backward and update.
size_t training_workspace(const ModelSpec& spec, const TrainingSizes& sizes);

/// Bytes for generation: `tokens` per forward pass, against a cache of at most `max_tokens`.
size_t generation_workspace(const ModelSpec& spec, const precision::Recipe& recipe, int64_t tokens,
                            int64_t max_tokens, DeviceType device, int partials, ops::Bf16Products products);

}  // namespace nrl::model
