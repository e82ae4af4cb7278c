#pragma once
// The input of a decoder: one microbatch and, for generation, the key/value cache.

#include <cstdint>
#include <vector>

#include "core/ops/attention.h"
#include "core/tensor/tensor.h"
#include "parallel/context/bounds.h"

namespace nrl::model {

/// Keys and values of many sequences in pages (core/ops/paged.h), and which of them the rows of a microbatch
/// in mode `generation` belong to: sequences with N rows in total, R of which have their next logits
/// computed.
struct PagedCache {
  struct Layer {
    Tensor keys, values;  ///< (pages * page, kv_width)
  };
  std::vector<Layer> layers;
  int64_t page = 0;     ///< tokens of a page
  Tensor slots;         ///< (N) i32: the row of the caches that a row is written to
  Tensor context;       ///< (S) i32: tokens of each sequence, the microbatch's included
  Tensor block_table;   ///< (S, P) i32: the pages of each sequence
  Tensor sampled_rows;  ///< (R) i32: ascending or not, may repeat
  int64_t longest = 0;  ///< the longest context
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
  const PagedCache* cache = nullptr;  ///< generation only
  /// With context parallelism, instead of cu_seqlens: the bounds of the attention calls of each kind of
  /// blocks (context_kinds()).
  std::vector<std::vector<parallel::CallBounds>> context_bounds = {};
};

}  // namespace nrl::model
