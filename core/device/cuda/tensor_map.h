#pragma once
// For kernels that use TMA: tensor maps, which the driver encodes (libcuda is never linked: the runtime finds
// the function), and whether the build has their code for the device.

#include <cstdint>

#include <cuda.h>

namespace nrl::device {

/// Encodes a map of matrices of 16-bit elements, [matrices, rows, columns], with `stride` elements between
/// rows and matrices without gaps. Its boxes are box_rows rows of 64 columns of one matrix, in shared memory
/// with 128-byte swizzle. False if the driver has no tensor maps or refuses this one: the address and the
/// stride in bytes must be multiples of 16, the stride below 2^40, no dimension 0 or above 2^32.
bool encode_tensor_map(CUtensorMap& map, const void* data, int64_t matrices, int64_t rows, int64_t columns,
                       int64_t stride, int box_rows);

/// Registers per thread of the kernel's code for this device; 0 where it has none.
int registers_of(const void* kernel);

}  // namespace nrl::device
