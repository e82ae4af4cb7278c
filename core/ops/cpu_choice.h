#pragma once
// Which CPU kernels run fastest on this processor.

#include <string>

#include "core/device/cpu/features.h"

namespace nrl::ops {

/// The best instruction set, but bf16 dot products only where they outrun f32 FMAs.
struct CpuChoice {
  cpu::Isa isa = cpu::Isa::baseline;
  double bf16_rate = 0;  ///< of dot products relative to f32 FMAs; 0: the processor has none
  bool amx = false;      ///< the processor has AMX_BF16, which no kernel uses
};

/// Processors differ by factors: dot products have 2 times the rate of f32 FMAs on Zen 4 and Zen 5, and 1 or
/// 1/2 times on Xeons. A limit between those factors makes the choice a property of the processor, not of its
/// load.
inline constexpr double native_rate = 1.4;

/// Measured once per process, on registers, on one thread, in about 10 ms.
const CpuChoice& cpu_choice();

/// "bf16 dot products run at 2.0 times the rate of fp32 FMAs (measured)"
std::string bf16_reason(const CpuChoice& choice);

}  // namespace nrl::ops
