#pragma once
// Which CPU kernels run fastest on this processor.

#include <string>

#include "core/device/cpu/features.h"
#include "core/ops/linear.h"

namespace nrl::ops {

/// The best instruction set, but one that multiplies bf16 only where that outruns f32 FMAs.
struct CpuChoice {
  cpu::Isa isa = cpu::Isa::baseline;
  cpu::Isa usable = cpu::Isa::baseline;  ///< the best that works, whether or not it is the fastest
  double bf16_rate = 0;          ///< of bf16 dot products relative to f32 FMAs; 0: the processor has none
  double amx_rate = 0;           ///< of AMX products; 0: the processor has no AMX that may be used
  std::string amx_problem = {};  ///< why AMX, which the processor has, must not be used
};

/// Processors differ by factors: dot products have 2 times the rate of f32 FMAs on Zen 4 and Zen 5, and 1 or
/// 1/2 times on Xeons, whose AMX has more. A limit between those factors makes the choice a property of the
/// processor, not of its load.
inline constexpr double native_rate = 1.4;

/// The fastest of the instruction sets up to `usable`, given these rates of CpuChoice.
cpu::Isa fastest_isa(cpu::Isa usable, double bf16_rate, double amx_rate);

/// Measured once per process, on registers, on one thread, in about 3 ms (6 with AMX). AMX must multiply
/// small integers exactly to be used.
const CpuChoice& cpu_choice();

/// How much faster than f32 this processor multiplies bf16 with kernels of KernelTable::bf16_products.
double bf16_rate(Bf16Products products);

/// "bf16 dot products run at 2.0 times the rate of fp32 FMAs (measured)"
std::string bf16_reason(const CpuChoice& choice);

}  // namespace nrl::ops
