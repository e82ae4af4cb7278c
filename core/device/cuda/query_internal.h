#pragma once
// Shared by the files that ask the CUDA runtime about devices.

namespace nrl::cuda {

/// A cudaDeviceAttr of a device; 0 when the driver does not tell.
int attribute_of(int which, int ordinal);

/// Bytes/s by the memory's clock and width; 0 when the driver does not tell.
double bandwidth_of(int ordinal);

}  // namespace nrl::cuda
