#pragma once
// Random normal numbers in bulk.

#include <cstdint>

#include "core/base/isa.h"
#include "core/base/philox.h"
#include "core/device/cpu/features.h"

namespace nrl::model {

/// out[i] = float(scale * v[i]) for the 4 * blocks elements v of stream.normals(first), stream.normals(first
/// + 1), ...: the same bits on every `isa`, which the processor must have, several times faster.
void scaled_normals(const PhiloxStream& stream, uint64_t first, int64_t blocks, double scale, float* out,
                    Isa isa = cpu::best_isa());

}  // namespace nrl::model
