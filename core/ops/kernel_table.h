#pragma once
// The typed table of kernels that a backend fills. A null entry is an op the backend does not have: coverage
// is checked before a run (coverage.h), so that nothing fails in the middle of one.

#include <bit>

#include "core/device/cpu/features.h"
#include "core/ops/activation.h"
#include "core/ops/attention.h"
#include "core/ops/cost.h"
#include "core/ops/cross_entropy.h"
#include "core/ops/dispatch.h"
#include "core/ops/dropout.h"
#include "core/ops/embedding.h"
#include "core/ops/fp8.h"
#include "core/ops/grouped_linear.h"
#include "core/ops/linear.h"
#include "core/ops/merge.h"
#include "core/ops/norm.h"
#include "core/ops/optimizer.h"
#include "core/ops/qk_norm_rope.h"
#include "core/ops/quantize.h"
#include "core/ops/rope.h"
#include "core/ops/router.h"
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
  X(dropout, Dropout)                               \
  X(adamw, AdamW)                                   \
  X(add_sum_of_squares, SumOfSquares)               \
  X(add_sum, AddSum)                                \
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
  X(update_scales, UpdateScales)
// clang-format on

struct KernelTable {
#define NRL_ENTRY(entry, Args) void (*entry)(Exec&, const Args&) = nullptr;
  NRL_KERNELS(NRL_ENTRY)
#undef NRL_ENTRY
  Bf16Products bf16_products = Bf16Products::upcast;  ///< CPU: of the linear layers
};

/// Names an entry of the table.
enum class Kernel : uint8_t {
#define NRL_ENTRY(entry, Args) entry,
  NRL_KERNELS(NRL_ENTRY)
#undef NRL_ENTRY
};

/// A set of entries of the table.
class KernelSet {
 public:
  void add(Kernel k) { bits_ |= bit(k); }
  bool contains(Kernel k) const { return (bits_ & bit(k)) != 0; }
  int size() const { return std::popcount(bits_); }
  bool operator==(const KernelSet&) const = default;

 private:
  static uint64_t bit(Kernel k) { return uint64_t{1} << static_cast<int>(k); }
  uint64_t bits_ = 0;
};

const char* name_of(Kernel kernel);

/// Every op calls this first. While a run's kernels are collected (Exec::needed) it adds `kernel`, with the
/// cost of the call if calls are collected, and returns true; the op must then return without having done
/// anything.
template <class Arguments>
bool noted(Exec& exec, Kernel kernel, const Arguments& a) {
  if (!exec.needed) return false;
  exec.needed->add(kernel);
  if (exec.calls) note_call(exec, name_of(kernel), cost(exec, a));
  return true;
}

/// The CPU's kernels for an instruction set (which the processor must have).
const KernelTable& cpu_kernels(cpu::Isa isa);

/// Their bf16_products, also where the processor does not have them: a plan is made on any machine.
constexpr Bf16Products bf16_products(cpu::Isa isa) {
  return isa == cpu::Isa::avx512_amx    ? Bf16Products::amx
         : isa == cpu::Isa::avx512_bf16 ? Bf16Products::native
         : isa == cpu::Isa::avx512      ? Bf16Products::packed
                                        : Bf16Products::upcast;
}

/// The GPU's kernels (core/ops/<op>/cuda.cu). Exit::unavailable if the build has no CUDA.
const KernelTable& cuda_kernels();

}  // namespace nrl::ops
