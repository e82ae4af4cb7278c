#pragma once
// CUDA support of this build and this machine. Two files implement it: devices.cpp with the
// toolkit, no_cuda.cpp without.

#include <string>
#include <vector>

namespace nrl::cuda {

struct DeviceInfo {
  std::string name;
  int major = 0, minor = 0;  ///< compute capability
  size_t memory = 0;         ///< bytes
  int multiprocessors = 0;
  std::string uuid;             ///< "GPU-..."; of a MIG slice the id of its GPU, by older drivers
  double memory_bandwidth = 0;  ///< bytes/s by the memory's clock and width; 0: not reported by the driver
  bool ecc = false;             ///< error correction of its memory is on
  bool mig = false;             ///< a slice of a GPU (multi-instance GPU)
  bool exclusive = false;       ///< only one process may use it at a time (compute mode)
  bool prohibited = false;      ///< no process may (compute mode)
  bool fits = false;            ///< this build has kernels for it
};

struct Status {
  bool built = false;         ///< compiled with the CUDA toolkit
  std::string toolkit;        ///< "13.0"; empty without
  std::string architectures;  ///< what the kernels were compiled for: "9.0a"; empty without
  std::string driver;         ///< the CUDA version that the driver supports; empty without a driver
  std::string problem;        ///< why no device can be used, and what to do; empty when one can
  std::vector<DeviceInfo> devices;
};

/// Asks the CUDA runtime; never fails and creates no context. Without a driver it says so in `problem`.
Status query();

// Defined in CUDA builds only.

/// A cudaDeviceAttr of a device; 0 when the driver does not report it.
int attribute_of(int which, int ordinal);

/// Bytes/s by the memory's clock and width; 0 when the driver does not report it.
double bandwidth_of(int ordinal);

}  // namespace nrl::cuda
