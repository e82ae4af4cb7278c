#pragma once
// The ops and the functions that enter their kernels into the table: for each op one per instruction set
// (its cpu.cpp) and one for the GPU (cuda.cu). Tests define tables of their own.

#include "core/ops/kernel_table.h"

namespace nrl::ops {

// clang-format off
#define NRL_OPS(X) \
  X(norm) X(rope) X(activation) X(embedding) X(cross_entropy) X(dropout) X(optimizer) \
  X(linear) X(attention) X(qk_norm_rope) X(merge) X(router) X(dispatch) X(grouped_linear) \
  X(fp8) X(quantize)
// clang-format on
/// Ops with kernels that AVX512_BF16 makes faster: they multiply bf16, or round to it.
#define NRL_BF16_OPS(X) \
  X(norm) X(rope) X(activation) X(embedding) X(cross_entropy) X(dropout) X(linear) X(qk_norm_rope) X(quantize)
/// Ops with kernels that AMX makes faster than AVX512_BF16.
#define NRL_AMX_OPS(X) X(linear)

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
