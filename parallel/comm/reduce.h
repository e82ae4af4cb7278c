#pragma once
// Element-wise reduction of several host buffers in a fixed order.

#include <cstdint>
#include <span>
#include <vector>

#include "core/base/dtype.h"
#include "parallel/comm/communicator.h"

namespace nrl::comm {

/// out[i] = parts[0][i] op parts[1][i] op ... from the left, `count` elements. `out` may be one of the parts.
/// bf16 is added in fp32 and rounded once. Element types as for Communicator's reductions.
void reduce_into(void* out, std::span<const void* const> parts, int64_t count, DType dtype, Reduce op);

/// The same in two steps: the parts of each group in the group's order, rounded to `dtype`; then the groups'
/// sums in the order of the groups. `groups` holds indices of parts.
void reduce_by_group(void* out, std::span<const void* const> parts, std::span<const std::vector<int>> groups,
                     int64_t count, DType dtype, Reduce op);

}  // namespace nrl::comm
