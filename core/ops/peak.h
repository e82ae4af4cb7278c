#pragma once
// What this machine's arithmetic can do, measured at start-up: the denominators of the utilisation figures.

#include <cstdint>

namespace nrl::ops {

/// Rate in GFLOP/s of f32 matrix products (the library that the linear layers use) with `threads` threads:
/// the best of those that fit into `seconds`, and of three at least. Allocates and frees about 7 MB.
double measure_gemm_peak(int threads, double seconds = 0.045);

/// Rate in GFLOP/s of multiply-adds on registers with the best instruction set of this processor on `threads`
/// threads at once: the f32 peak. Takes about 10 ms.
double measure_fma_peak(int threads);

/// The probe of one instruction set, supplied by its kernels.
struct FmaProbe {
  double (*run)(int64_t rounds) = nullptr;  ///< returns the operations done
  int lanes = 0;
  bool fused = false;
};

}  // namespace nrl::ops
