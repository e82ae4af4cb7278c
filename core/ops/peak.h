#pragma once
// Peak FLOP/s of this machine, measured at start-up: the denominators of the utilization figures.

#include <cstdint>

namespace nrl::ops {

/// GFLOP/s of f32 GEMMs (with the library of the linear layers) on `threads` threads: the best of those that
/// fit into `seconds`, at least three. Allocates and frees about 7 MB.
double measure_gemm_peak(int threads, double seconds = 0.045);

/// f32 peak: GFLOP/s of multiply-adds on registers with the best instruction set of this processor, on
/// `threads` threads at once. Takes about 10 ms.
double measure_fma_peak(int threads);

/// The probe of one instruction set (gemm/fma_probe.cpp).
struct FmaProbe {
  double (*run)(int64_t rounds) = nullptr;  ///< returns the floating-point operations
  int lanes = 0;
  bool fused = false;
};

}  // namespace nrl::ops
