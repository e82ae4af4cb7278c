// Stands in for core/ops/gemm/peak.cpp in programs that make many runs: each would measure for 45 ms.
#include "core/ops/peak.h"

int64_t nrl::ops::gemm_peak_bytes(int) {
  return 7 << 20;
}

double nrl::ops::measure_gemm_peak(int, double) {
  return 40;
}

double nrl::ops::measure_fma_peak(int threads, double) {
  return 40.0 * threads;
}
