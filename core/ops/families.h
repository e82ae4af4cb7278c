#pragma once
// The families of ops and the functions that put their kernels into the table: one per family and instruction
// set, defined by the family's cpu.cpp, one in its reference.cpp, and one per GPU (`cuda` and `sim`) in its
// cuda.cu.

#include "core/ops/kernel_table.h"

namespace nrl::ops {

// clang-format off
#define NRL_OPS_FAMILIES(X) \
  X(norm) X(rope) X(activation) X(embedding) X(cross_entropy) X(dropout) X(optimizer) \
  X(linear) X(attention) X(qk_norm_rope)
// clang-format on

#define NRL_DECLARE_FILL(family) void fill_##family(KernelTable& table);
namespace baseline {
NRL_OPS_FAMILIES(NRL_DECLARE_FILL)
}
namespace avx2 {
NRL_OPS_FAMILIES(NRL_DECLARE_FILL)
}
namespace avx512 {
NRL_OPS_FAMILIES(NRL_DECLARE_FILL)
}
namespace reference {
NRL_OPS_FAMILIES(NRL_DECLARE_FILL)
}
namespace cuda {
NRL_OPS_FAMILIES(NRL_DECLARE_FILL)
}
namespace sim {
NRL_OPS_FAMILIES(NRL_DECLARE_FILL)
}
#undef NRL_DECLARE_FILL

/// Defines `const KernelTable& function()`, the table that the ops' fill functions of namespace `backend`
/// make.
#define NRL_DEFINE_TABLE(function, backend) \
  const KernelTable& function() {           \
    static const KernelTable filled = [] {  \
      using namespace backend;              \
      KernelTable table;                    \
      NRL_OPS_FAMILIES(NRL_FILL)            \
      return table;                         \
    }();                                    \
    return filled;                          \
  }
#define NRL_FILL(op) fill_##op(table);

}  // namespace nrl::ops
