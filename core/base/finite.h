#pragma once
// Counting NaN and infinity in raw tensor data.

#include <cstddef>
#include <cstdint>

#include "core/base/dtype.h"

namespace nrl {

/// Elements of `bytes` bytes at `data` that are NaN or infinite; 0 for integers and fp8. Decided on the bits,
/// so that no floating-point option of the compiler matters.
int64_t count_non_finite(DType dtype, const void* data, size_t bytes);

}  // namespace nrl
