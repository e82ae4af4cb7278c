#pragma once
// The families of ops and the functions that put their kernels into the table: one per family and instruction
// set, defined by the family's cpu.cpp, one in its ref.cpp, and one per GPU (`cuda` and `sim`) in its
// cuda.cu.

namespace nrl::ops {

struct KernelTable;

// clang-format off
#define NRL_OPS_FAMILIES(X) \
  X(norm) X(rope) X(activation) X(embedding) X(cross_entropy) X(dropout) X(optimizer) \
  X(linear) X(attention) X(step) X(qk)
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

}  // namespace nrl::ops
