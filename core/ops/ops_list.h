#pragma once
// The ops, their kernels, and the functions that enter kernels into the table (kernel_table.h): for each op
// one per instruction set (its cpu.cpp) and one for the GPU (cuda.cu). Tests define tables of their own.

#include "core/ops/activation.h"
#include "core/ops/attention.h"
#include "core/ops/cross_entropy.h"
#include "core/ops/dispatch.h"
#include "core/ops/distillation.h"
#include "core/ops/dropout.h"
#include "core/ops/embedding.h"
#include "core/ops/fp8.h"
#include "core/ops/grouped_linear.h"
#include "core/ops/hash.h"
#include "core/ops/linear.h"
#include "core/ops/merge.h"
#include "core/ops/norm.h"
#include "core/ops/optimizer.h"
#include "core/ops/paged.h"
#include "core/ops/pair_loss.h"
#include "core/ops/policy_loss.h"
#include "core/ops/qk_norm_rope.h"
#include "core/ops/quantize.h"
#include "core/ops/rope.h"
#include "core/ops/router.h"
#include "core/ops/sample.h"
#include "core/ops/segments.h"
#include "core/ops/step.h"

namespace nrl::ops {

// clang-format off
/// X(entry, argument struct): one row per kernel. Everything that lists the ops (table, coverage, tests) uses this.
#define NRL_KERNELS(X)                              \
  X(norm_forward, NormForward)                      \
  X(norm_backward, NormBackward)                    \
  X(rope, Rope)                                     \
  X(activation_forward, ActivationForward)          \
  X(activation_backward, ActivationBackward)        \
  X(embedding_forward, EmbeddingForward)            \
  X(embedding_backward, EmbeddingBackward)          \
  X(linear_forward, LinearForward)                  \
  X(linear_backward_data, LinearBackwardData)       \
  X(linear_backward_weight, LinearBackwardWeight)   \
  X(attention_forward, AttentionForward)            \
  X(attention_backward, AttentionBackward)          \
  X(cross_entropy, CrossEntropy)                    \
  X(cross_entropy_statistics, CrossEntropyStatistics) \
  X(cross_entropy_gradient, CrossEntropyGradient)   \
  X(segment_sum, SegmentSum)                        \
  X(segment_rows, SegmentRows)                      \
  X(pair_loss, PairLoss)                            \
  X(policy_loss, PolicyLoss)                        \
  X(top_columns, TopColumns)                        \
  X(gather_columns, GatherColumns)                  \
  X(topk_kl, TopkKl)                                \
  X(scatter_columns, ScatterColumns)                \
  X(dropout, Dropout)                               \
  X(adamw, AdamW)                                   \
  X(add_sum_of_squares, SumOfSquares)               \
  X(add_sum, AddSum)                                \
  X(add_hash, AddHash)                              \
  X(decide_step, DecideStep)                        \
  X(column_sums, ColumnSums)                        \
  X(qk_norm_rope_forward, QkNormRopeForward)        \
  X(qk_norm_rope_backward, QkNormRopeBackward)      \
  X(router_forward, RouterForward)                  \
  X(router_counts, RouterCounts)                    \
  X(router_balance, RouterBalance)                  \
  X(router_backward, RouterBackward)                \
  X(router_bias, RouterBias)                        \
  X(dispatch_sort, DispatchSort)                    \
  X(permute, Permute)                               \
  X(regroup_rows, RegroupRows)                      \
  X(unpermute, Unpermute)                           \
  X(gate_backward, GateBackward)                    \
  X(grouped_linear_forward, GroupedLinearForward)   \
  X(grouped_linear_backward_data, GroupedLinearBackwardData) \
  X(grouped_linear_backward_weight, GroupedLinearBackwardWeight) \
  X(convert, Convert)                               \
  X(zero, Zero)                                     \
  X(add_rows, AddRows)                              \
  X(merge_attention, MergeAttention)                \
  X(sum_parts, SumParts)                            \
  X(fp8_encode, Fp8Encode)                          \
  X(fp8_decode, Fp8Decode)                          \
  X(quantize, Quantize)                             \
  X(transpose, Transpose)                           \
  X(largest_magnitude, LargestMagnitude)            \
  X(block_magnitudes, BlockMagnitudes)              \
  X(quantize_part, QuantizePart)                    \
  X(update_scales, UpdateScales)                    \
  X(cache_write, CacheWrite)                        \
  X(attention_paged, AttentionPaged)                \
  X(sample_tokens, SampleTokens)                    \
  X(join_samples, JoinSamples)
// clang-format on

struct KernelTable;

// clang-format off
/// The ops; CMakeLists.txt reads the names of their folders here.
#define NRL_OPS(X) \
  X(norm) X(rope) X(activation) X(embedding) X(cross_entropy) X(dropout) X(optimizer) \
  X(linear) X(attention) X(qk_norm_rope) X(merge) X(router) X(dispatch) X(grouped_linear) \
  X(fp8) X(hash) X(quantize) X(segments) X(pair_loss) X(policy_loss) X(distillation) X(paged) X(sample)
/// Ops with kernels that AVX512_BF16 makes faster: they multiply bf16, or round to it.
#define NRL_BF16_OPS(X) \
  X(norm) X(rope) X(activation) X(embedding) X(cross_entropy) X(dropout) \
  X(linear) X(attention) X(qk_norm_rope) X(quantize)
// clang-format on
/// Ops with kernels that AMX makes faster than AVX512_BF16.
#define NRL_AMX_OPS(X) X(linear) X(attention)

/// NRL_OPS(NRL_DECLARE_FILL) declares the functions of a namespace.
#define NRL_DECLARE_FILL(op) void fill_##op(KernelTable& table);
namespace baseline {
NRL_OPS(NRL_DECLARE_FILL)
}
namespace avx2 {
NRL_OPS(NRL_DECLARE_FILL)
}
namespace avx512 {
NRL_OPS(NRL_DECLARE_FILL)
}
namespace avx512_bf16 {
NRL_BF16_OPS(NRL_DECLARE_FILL)
}
namespace avx512_amx {
NRL_AMX_OPS(NRL_DECLARE_FILL)
}

/// Defines `const KernelTable& function()`, filled by the ops' fill functions of namespace `backend`.
#define NRL_DEFINE_TABLE(function, backend) \
  const KernelTable& function() {           \
    static const KernelTable filled = [] {  \
      using namespace backend;              \
      KernelTable table;                    \
      NRL_OPS(NRL_FILL)                     \
      return table;                         \
    }();                                    \
    return filled;                          \
  }
#define NRL_FILL(op) fill_##op(table);

}  // namespace nrl::ops
