#pragma once
// The parts of a step that its ops belong to, and the time that a call of an op takes at the best rates of a
// machine: predictions, rooflines and profiles group and judge calls alike.

#include <algorithm>
#include <span>
#include <string_view>

#include "core/ops/cost.h"

namespace nrl::plan {

/// The part of a step that is no kernel's, and the one of ops without a part of their own.
inline constexpr std::string_view between_kernels = "between kernels", other_ops = "other";

/// The part of a step that an op belongs to, by its name and the innermost trace range around it ("layer_3",
/// "recompute", "loss_computation"); "" for a range that is no op.
std::string_view part_of(std::string_view op, std::string_view range);

/// All parts, in the order of tables; between_kernels is the last one.
std::span<const std::string_view> step_parts();

/// The rates of this machine at best, of one rank while the others work, too.
struct Peaks {
  double f32_flops = 0, bf16_flops = 0, fp8_flops = 0;  ///< FLOP/s, by the type of the factors; 0: unknown
  double copy = 0;                                      ///< bytes/s that a large copy reads and writes
  double link = 0, network = 0;  ///< bytes/s between ranks of a node, and of different ones; 0: unknown
};

/// Seconds of calls at the rates of a machine; the longer one limits them. Williams et al., Roofline (2009).
/// 0: the rate is unknown.
struct Attainable {
  double arithmetic = 0, memory = 0;
  double seconds() const { return std::max(arithmetic, memory); }
};
Attainable attainable(const ops::Cost& cost, const Peaks& peaks);

}  // namespace nrl::plan
