#pragma once

namespace nrl::ops_test {

/// What tests on the simulated device cannot show. Printed by `op_tests list` and by gpu_tests.
inline constexpr const char* uncovered_without_gpu =
    R"(What only a GPU can show:
  kernels     wgmma, TMA and mbarriers (GEMMs of experts in bf16 and f16 on compute capability 9.0) are not
              modeled; clusters and cooperative groups are not used
  kernels     results of reordered memory accesses; the engine's are sequentially consistent (accesses that
              nothing orders are a race to the thread sanitizer; the scopes of signals are not told apart)
  kernels     progress of blocks that wait for others; the engine checks that those have started
  kernels     the GPU's __expf, __logf, __fdividef, ex2, rcp and its fused multiply-adds: accuracy against the same
              references
  kernels     registers at run time, occupancy, bank conflicts, divergence, speed
  libraries   cuBLASLt: whether it has an algorithm for each shape, type and epilogue, its numbers, its speed
  libraries   cuDNN: execution of the attention graphs (their support is checked from a device description)
  libraries   NCCL: communicators, collectives, errors of a lost peer
  runtime     errors that surface asynchronously, out of memory by fragmentation, capture and replay of CUDA graphs,
              overlap of copies and kernels, unified addressing and peer access
)";

}  // namespace nrl::ops_test
