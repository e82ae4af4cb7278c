// The GPU's table, compiled once for CUDA and once for the simulated device (NRL_GPU).

#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"

#define NRL_JOIN(a, b) a##b
#define NRL_TABLE(gpu) NRL_JOIN(gpu, _kernels)

namespace nrl::ops {

namespace NRL_GPU {
NRL_OPS(NRL_DECLARE_FILL)
}

NRL_DEFINE_TABLE(NRL_TABLE(NRL_GPU), NRL_GPU)

}  // namespace nrl::ops
