#pragma once
// What context-parallel attention of a layer is on one rank.

#include "core/base/dtype.h"
#include "core/ops/attention.h"
#include "parallel/context/bounds.h"

namespace nrl::parallel {

/// Attention of one layer on one rank.
struct ContextShape {
  ContextExchange exchange;
  ZigZag zigzag;               ///< the rank's share of a microbatch
  int64_t heads, kv_heads, d;  ///< of this rank's queries, keys and values; multiples of exchange.a2a
  DType dtype = DType::f32;    ///< f32, bf16 or f16
  int64_t window = 0;          ///< as in ops::AttentionForward
  float scale = 1.0f;
  ops::HeadSlice slice = {};  ///< of `heads` among those of all ranks (dropout masks)
};

}  // namespace nrl::parallel
