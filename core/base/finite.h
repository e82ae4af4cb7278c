#pragma once
// Counting NaN and infinity in raw tensor data.

#include <cstddef>
#include <cstdint>

#include "core/base/dtype.h"

namespace nrl {

/// Number of NaN or infinite elements in `bytes` bytes at `data`; 0 for integers and fp8. Tests the bits, so
/// floating-point options of the compiler have no effect.
int64_t count_non_finite(DType dtype, const void* data, size_t bytes);

}  // namespace nrl
