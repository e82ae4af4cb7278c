#pragma once
// The input of a decoder: one microbatch and, for generation, the key/value cache.

#include <cstdint>
#include <vector>

#include "core/ops/attention.h"
#include "core/tensor/tensor.h"
#include "parallel/context/bounds.h"

namespace nrl::model {

/// Keys and values of the previous tokens of one sequence.
struct KeyValueCache {
  struct Layer {
    Tensor keys, values;  ///< (max tokens, kv_width), contiguous
  };
  std::vector<Layer> layers;
  int64_t length = 0;  ///< tokens in the cache before the microbatch
  Tensor cu_keys;      ///< (2) i32: 0 and the length after the microbatch
};

/// One microbatch in device memory: S sequences with N tokens in total, concatenated. With context
/// parallelism the N tokens are this rank's (parallel::ZigZag).
struct MicroBatch {
  Tensor ids;             ///< (N) i32
  Tensor target;          ///< (N) i32; < 0: no target
  Tensor positions;       ///< (N) i32, position within the sequence
  Tensor cu_seqlens;      ///< (S + 1) i32
  Tensor loss_weight;     ///< (N) f32: dLoss/dlog_prob of each token; training only
  int index = 0;          ///< index of the microbatch in the step
  int64_t first_row = 0;  ///< index of token 0 in the global batch (dropout masks)
  float share = 1;        ///< its part of the tokens of the global batch: weight of its router losses
  Tensor step;            ///< (1) i64, number of the optimizer step (dropout masks)
  /// (N) i32, with context parallelism and dropout: the index of each token in the global batch, relative to
  /// first_row.
  Tensor dropout_rows;
  // Inputs of an objective (LossNeeds), with S' sequences that are no padding; rows of padding are in none.
  Tensor segment;               ///< (N) i32: the row's sequence; < 0: padding
  Tensor sequence_values;       ///< (S', values) f64
  std::vector<Tensor> columns;  ///< (N, width) each, or (N)
  ops::SequenceLengths lengths;
  const KeyValueCache* cache = nullptr;  ///< generation only
  /// With context parallelism, instead of cu_seqlens: the bounds of the attention calls of each exchange
  /// (distinct_exchanges()).
  std::vector<std::vector<parallel::CallBounds>> context_bounds = {};
};

}  // namespace nrl::model
