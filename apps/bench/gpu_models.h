#pragma once
// GPUs that a step can be predicted for, with the rates that are assumed of them. All of them are
// assumptions: gpu_models.cpp names the sources.

#include <cstdint>
#include <string>
#include <string_view>

#include "core/device/runtime.h"
#include "core/ops/cost.h"

namespace nrl::bench {

/// Fractions of the bf16 peak that fused attention reaches on long sequences, by head dimension.
struct AttentionRates {
  double d64, d128, d256;
};

struct GpuModel {
  std::string_view name;     ///< of --predict
  std::string_view product;  ///< part of the driver's name for the device; train::peak_flops() knows it
  int major;                 ///< compute capability
  int multiprocessors;
  double memory;                     ///< bytes
  double copy;                       ///< bytes/s read and written by a large copy
  double f32_flops;                  ///< FLOP/s of f32 on the data sheet, not on tensor cores
  double tf32_flops;                 ///< dense, on the data sheet
  double gemm;                       ///< fraction of the peak in the main loop of a large GEMM
  AttentionRates forward, backward;  ///< of cuDNN

  double bf16_flops() const;  ///< dense, on the data sheet
  /// For a dry run (device::open_dry_run).
  device::Properties properties() const;
};

/// Fails with Exit::usage and the names that there are.
const GpuModel& find_gpu_model(const std::string& name);

/// Factors on the assumed rates.
struct Scenario {
  double arithmetic = 1, bandwidth = 1;
};
inline constexpr Scenario likely{}, poor{.arithmetic = 0.90, .bandwidth = 0.88},
    good{.arithmetic = 1.06, .bandwidth = 1.07};

/// What limits a call; the larger one counts.
struct CallTime {
  double arithmetic = 0, memory = 0;  ///< seconds
  double seconds() const { return arithmetic > memory ? arithmetic : memory; }
};
/// The estimated time of one call, without the gaps between kernels.
CallTime estimate(const GpuModel& gpu, const ops::Call& call, const Scenario& scenario);

/// Seconds between two kernels, and for the first and last blocks of one.
inline constexpr double launch_gap = 2e-6;

/// The assumptions in words, a line each.
std::string assumptions(const GpuModel& gpu);

}  // namespace nrl::bench
