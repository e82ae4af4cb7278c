#pragma once
// Peak FLOP/s of this machine, measured at start-up: the denominators of the utilization figures.

#include <cstdint>

#include "core/device/cpu/features.h"

namespace nrl::ops {

/// Memory of measure_gemm_peak() while it runs: operands and scratch memory.
int64_t gemm_peak_bytes(int threads);
/// GFLOP/s of f32 GEMMs of 768 x 768 x 768 (forward passes of linear layers) on `threads` threads: the best
/// of those that fit into `seconds`, at least three. Allocates and frees gemm_peak_bytes().
double measure_gemm_peak(int threads, double seconds = 0.015);

/// f32 peak: GFLOP/s of multiply-adds on registers with the best instruction set of this processor, on
/// `threads` threads at once: the best slice of 1 ms of those that fit into `seconds`.
double measure_fma_peak(int threads, double seconds = 0.010);

/// The probe of one instruction set (gemm/fma_probe.cpp). The loops return the floating-point operations.
struct FmaProbe {
  double (*run)(int64_t rounds) = nullptr;
  double (*run_bf16)(int64_t rounds) = nullptr;  ///< products of bf16; null where there are none
  bool (*exact)() = nullptr;  ///< AMX only, else null: true if small integers are multiplied exactly
  int lanes = 0;
  bool fused = false;
};

FmaProbe fma_probe(cpu::Isa isa);
/// A number of rounds of a probe's loop that takes at least `seconds`.
int64_t rounds_that_last(double (*loop)(int64_t rounds), double seconds);

}  // namespace nrl::ops
